"""Writes curves for TensorBoard. The only file that imports it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rollout.tracking.tracker import Clock, OneWriter


class TensorboardTracker(OneWriter):
    """One event file under ``FOLDER/tensorboard``. Every curve has its own steps there: its clock."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Write one point per value."""
        self.check_owner()
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=at)

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Ignore: records live in the journal."""

    def finish(self) -> None:
        """Flush and close."""
        if self.claim_finish():
            self._writer.close()
