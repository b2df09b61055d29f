"""The journal: one file per kind of record, one JSON object per line, appended and flushed at once.

Every line has ``schema``, ``kind``, ``run_id`` and ``time_s`` (seconds since the epoch); ``metrics`` lines
have ``clock``, ``at`` and ``values``. A line torn by a crash is cut off when the run is resumed.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rollout.settings import to_plain
from rollout.tracking.tracker import Clock, OneWriter, check_metrics, finite_only

log = logging.getLogger(__name__)

SCHEMA = 1
METRICS = "metrics"
KIND_NAME = re.compile(r"[a-z][a-z_]*")
"""What a kind of record may be called. Other files of the run's folder have a dash or dot in their names."""


class JsonlTracker(OneWriter):
    """Appends to ``FOLDER/KIND.jsonl``."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        super().__init__()
        self._folder, self._run_id = folder, run_id
        self._files: dict[str, BinaryIO] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Write one line. NaN and infinity are not JSON: they are named in ``nonfinite`` instead."""
        self.check_owner()
        check_metrics(values, clock)
        kept, nonfinite = finite_only(values)
        fields: dict[str, Any] = {"clock": clock, "at": at, "values": kept}
        if nonfinite:
            log.warning("%s %d: not finite: %s", clock, at, ", ".join(nonfinite))
            fields["nonfinite"] = nonfinite
        self._write(METRICS, fields)

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one line of ``kind``. Raises ``ValueError`` for what is not plain data."""
        self.check_owner()
        if not KIND_NAME.fullmatch(kind) or kind == METRICS:
            raise ValueError(f"{kind!r} cannot name a kind of record")
        self._write(kind, fields)

    def finish(self) -> None:
        """Close the files."""
        if self.claim_finish():
            for file in self._files.values():
                file.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        line = {"schema": SCHEMA, "kind": kind, "run_id": self._run_id, "time_s": time.time(), **fields}
        try:
            text = json.dumps(to_plain(line), allow_nan=False, separators=(",", ":"))
        except TypeError as error:
            raise ValueError(f"record {kind!r} holds something that is not plain data: {error}") from error
        file = self._files.get(kind)
        if file is None:
            path = self._folder / f"{kind}.jsonl"
            cut_torn_line(path)
            file = self._files[kind] = path.open("ab")
        file.write(text.encode() + b"\n")
        file.flush()


def read_jsonl(folder: Path, kind: str = METRICS) -> Iterator[dict[str, Any]]:
    """Yield the lines of one kind, oldest first; none when the run has none. Skips a torn last line."""
    path = folder / f"{kind}.jsonl"
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            line = json.loads(raw)
            if line.get("schema") != SCHEMA:
                raise ValueError(
                    f"{path}:{number}: schema {line.get('schema')!r}, this version reads {SCHEMA}"
                )
            yield line


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline, so that a file can be appended to; none is fine."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        content_end = file.seek(0, os.SEEK_END)
        position = content_end
        tail = b""
        while position > 0 and b"\n" not in tail:
            step = min(65536, position)
            position -= step
            file.seek(position)
            tail = file.read(step) + tail
        whole_end = position + tail.rfind(b"\n") + 1
        if whole_end < content_end:
            log.warning("%s: cut off %d bytes of a torn last line", path, content_end - whole_end)
            file.truncate(whole_end)
