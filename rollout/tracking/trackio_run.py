"""Sends curves to trackio's local store. The only file that imports trackio."""

from collections.abc import Mapping
from typing import Any

import trackio

from rollout.tracking.tracker import Clock, OneWriter


class TrackioTracker(OneWriter):
    """One trackio run, owned by the driver."""

    def __init__(self, *, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._run = trackio.init(
            project=project, name=run_id, config=dict(config), resume="allow", embed=False
        )

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Store one row with its own clock beside it."""
        self.check_owner()
        self._run.log({**values, clock: at})

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Ignore: records live in the journal."""

    def finish(self) -> None:
        """Close the run."""
        if self.claim_finish():
            trackio.finish()
