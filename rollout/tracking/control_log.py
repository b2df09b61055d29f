"""Control logs: one file per host, exactly the lines ``python -m controller.replay`` decides again."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from controller.log import Record, decision_record, facts_record
from rollout.tracking.jsonl import cut_torn_line

if TYPE_CHECKING:
    from rollout.service.records import RoundRecord

log = logging.getLogger(__name__)


class ControlLogs:
    """Appends to ``FOLDER/controller-HOST.jsonl``.

    A log with a round missing would replay to other decisions. So a host's log ends, with one warning, where
    its records have a gap, and goes on only with a controller that starts afresh.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_round: dict[str, int | None] = {}
        """By host: the round its log goes on with, None once it has ended."""

    def rounds(self, records: Iterable["RoundRecord"]) -> None:
        """Take rounds in the order they ran on each host."""
        lines: dict[str, list[str]] = {}
        for record in records:
            if self._follows(record):
                lines.setdefault(record.host, []).extend(json.dumps(line) for line in lines_of(record))
        self._folder.mkdir(parents=True, exist_ok=True)
        for host, more in lines.items():
            path = self.path(host)
            cut_torn_line(path)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join(more) + "\n")

    def path(self, host: str) -> Path:
        """Return the file of a host."""
        return self._folder / f"controller-{host}.jsonl"

    def _follows(self, record: "RoundRecord") -> bool:
        """Whether the host's log can go on with this round."""
        host, index = record.host, record.load.round_index
        starts = any(event["event"] == "controller" for event in record.events)
        expected = self._next_round.get(host, -1)
        if not starts and index != expected:
            if expected is not None:
                found = "has no start" if expected < 0 else f"lacks rounds {expected} to {index - 1}"
                log.warning("the control log of host %s %s and ends: round records were lost", host, found)
            self._next_round[host] = None
            return False
        self._next_round[host] = index + 1
        return True


def lines_of(record: "RoundRecord") -> Iterator[Record]:
    """Yield a round's lines: what the controller heard before, what it decided, what came of it."""
    yield from record.events
    yield decision_record(record.load, record.plan, now_s=record.at_s)
    yield facts_record(record.facts)
