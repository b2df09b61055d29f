"""Sends curves to Weights & Biases; offline when there is no login. The only file that imports wandb."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import wandb

from rollout.tracking.tracker import CLOCK_OF_AREA, CLOCKS, Clock, OneWriter

Mode = Literal["online", "offline", "disabled"]
log = logging.getLogger(__name__)


class WandbTracker(OneWriter):
    """One wandb run, owned by the driver."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str | None,
        run_id: str,
        offline: bool,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        mode = _mode(offline)
        self.run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            dir=str(folder),
            mode=mode,
            config=dict(config),
            resume="allow" if mode == "online" else None,  # an offline run cannot ask the server
            settings=wandb.Settings(console="off", silent=True),
        )
        for clock in CLOCKS:
            self.run.define_metric(clock)
        for area, clock in CLOCK_OF_AREA.items():
            self.run.define_metric(f"{area}/*", step_metric=clock)

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Send one row with its own clock beside it.

        wandb's ``step`` is never passed: a row whose step lies behind the last one is dropped there.
        """
        self.check_owner()
        self.run.log({**values, clock: at})

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Ignore: records live in the journal."""

    def finish(self) -> None:
        """Close the run."""
        if self.claim_finish():
            self.run.finish()


def _mode(offline: bool) -> Mode:
    chosen = os.environ.get("WANDB_MODE")
    if chosen in ("online", "offline", "disabled"):
        return cast(Mode, chosen)
    if offline:
        return "offline"
    if wandb.api.api_key is None:
        log.warning("no wandb login found: the run is kept offline; send it later with `wandb sync`")
        return "offline"
    return "online"
