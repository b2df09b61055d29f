"""Turns the journal into Parquet when a run ends. The only file that imports pyarrow."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.tracking.jsonl import KIND_NAME, METRICS, read_jsonl
from rollout.tracking.tracker import Clock, OneWriter


class ParquetExport(OneWriter):
    """Holds nothing while the run goes on; writes ``FOLDER/KIND.parquet`` from the journal at its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Ignore: the journal has it."""

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Ignore: the journal has it."""

    def finish(self) -> None:
        """Write one file per kind the journal holds."""
        if self.claim_finish():
            for path in sorted(self._folder.glob("*.jsonl")):
                if KIND_NAME.fullmatch(path.stem):
                    export_kind(self._folder, path.stem)


def export_kind(folder: Path, kind: str) -> Path:
    """Write ``FOLDER/KIND.parquet`` and return it. Metrics become one row per value."""
    target = folder / f"{kind}.parquet"
    rows = list(read_jsonl(folder, kind))
    table = _metrics_table(rows) if kind == METRICS else _records_table(rows)
    pq.write_table(table, target)
    return target


def _metrics_table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (line["time_s"], line["clock"], line["at"], name, value)
        for line in lines
        for name, value in line["values"].items()
    ]
    schema = pa.schema(
        [
            ("time_s", pa.float64()),
            ("clock", pa.string()),
            ("at", pa.int64()),
            ("name", pa.string()),
            ("value", pa.float64()),
        ]
    )
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _records_table(lines: list[dict[str, Any]]) -> Any:
    # Nested mappings have names that differ from line to line, which a column's type cannot: kept as JSON.
    flat = [{k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in x.items()} for x in lines]
    return pa.Table.from_pylist(flat)
