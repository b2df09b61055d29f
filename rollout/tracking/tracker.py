"""What a tracker is, and which clock each kind of number runs on.

There is one writer per run, in the driver. Hosts return plain records and never own a tracker: a run that
is forked or pickled into another process deadlocks or overwrites itself, so both are refused here.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, get_args

Clock = Literal["trainer/step", "rollout/step", "engine/round"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)

CLOCK_OF_AREA: dict[str, Clock] = {
    "trainer": "trainer/step",
    "train": "trainer/step",
    "reward": "trainer/step",
    "rollout": "rollout/step",
    "service": "rollout/step",
    "engine": "engine/round",
    "controller": "engine/round",
}
"""A metric is ``area/what_unit``, and its area says which clock it is drawn over. The clocks run at their
own speeds and may restart, so no backend's single global step is ever used."""


class Tracker(Protocol):
    """Takes a run's numbers."""

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Take ``values`` measured when ``clock`` showed ``at``. Nothing is dropped, in any order."""
        ...

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take one plain record (a round, a completion, an event). Backends of curves ignore it."""
        ...

    def finish(self) -> None:
        """Write out what is held; the tracker takes nothing afterwards."""
        ...


class OneWriter:
    """Base of every tracker: usable in the process that made it, and only until it is finished."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._finished = False

    def check_owner(self) -> None:
        """Raise ``RuntimeError`` in a forked child or after ``finish``."""
        if os.getpid() != self._owner:
            raise RuntimeError("a tracker belongs to the driver; other processes return plain records to it")
        if self._finished:
            raise RuntimeError("this tracker is finished")

    def claim_finish(self) -> bool:
        """Return whether the caller is to finish now: once, and never in a forked child."""
        mine = os.getpid() == self._owner and not self._finished
        self._finished = self._finished or mine
        return mine

    def __reduce__(self) -> NoReturn:
        raise TypeError("a tracker cannot be sent to another process; send plain records to the driver")


def check_metrics(values: Mapping[str, float], clock: Clock) -> None:
    """Refuse names that run on another clock, and values that are no numbers. Raises ``ValueError``."""
    for name, value in values.items():
        area, _, what = name.partition("/")
        if not what or area not in CLOCK_OF_AREA:
            raise ValueError(f"metric {name!r}: expected AREA/NAME with one of {', '.join(CLOCK_OF_AREA)}")
        if CLOCK_OF_AREA[area] != clock:
            raise ValueError(f"metric {name!r} runs on {CLOCK_OF_AREA[area]}, not on {clock}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"metric {name!r} is not a number: {value!r}")


def finite_only(values: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the values that can be drawn, and the names of those that are NaN or infinite."""
    kept = {name: value for name, value in values.items() if math.isfinite(value)}
    return kept, [name for name in values if name not in kept]


class Trackers(OneWriter):
    """Several trackers as one."""

    def __init__(self, members: Sequence[Tracker]) -> None:
        super().__init__()
        self._members = tuple(members)

    def log(self, values: Mapping[str, float], *, clock: Clock, at: int) -> None:
        """Hand on to every member, after one check for all."""
        self.check_owner()
        check_metrics(values, clock)
        for member in self._members:
            member.log(values, clock=clock, at=at)

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hand on to every member."""
        self.check_owner()
        for member in self._members:
            member.record(kind, fields)

    def finish(self) -> None:
        """Finish every member, the first one last: it is the journal the others may read."""
        if self.claim_finish():
            for member in reversed(self._members):
                member.finish()
