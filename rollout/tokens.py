"""Committed tokens, kept by column.

A rollout is thousands of tokens, each with four logprobs and where it came from. They are committed one by
one, told from process to process and read whole, so an object for each costs more than the token: to pickle
and unpickle a thousand took 12 ms, and takes 23 microseconds as columns. ``Tokens`` reads like a tuple of
``TokenRecord``, made when somebody asks for one.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, overload

Origin = Literal["plain", "accepted", "corrected", "bonus"]
"""How a token came to be: no drafts that round, a kept draft, the target's choice instead of a draft,
the extra token after a fully kept block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """One committed token and everything known about it. Logs are natural."""

    token_id: int
    raw_logprob: float
    """Temperature 1, full vocabulary, before any processing."""

    scaled_logprob: float
    """Temperature only, full vocabulary: what TRL and verl recompute. Equals raw when greedy."""

    target_logprob: float
    """Under the target distribution it was drawn from; 0 when greedy."""

    kept_logmass: float
    """Log of the mass the filters kept, of the penalised and scaled distribution; 0 without filters."""

    policy_version: int
    origin: Origin
    drafter: str
    """Which drafter's round committed it; ``ar`` when none."""


class Source(NamedTuple):
    """What tokens of a round have in common. A rollout has few different ones."""

    policy_version: int
    origin: Origin
    drafter: str


_LOGS = 4
"""Logs of a token, in the order of ``TokenRecord``."""

_source_of = attrgetter("policy_version", "origin", "drafter")


class Tokens(Sequence[TokenRecord]):
    """Committed tokens in order. Equal to any sequence of equal records; slices are ``Tokens``.

    A slice shares the columns of what it was cut from, which only ever grow.
    """

    __slots__ = ("_ids", "_logs", "_marks", "_sources", "_start", "_stop")

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self._ids: array[int] = array("i")
        self._logs: array[float] = array("d")
        """``_LOGS`` numbers a token."""

        self._marks: array[int] = array("H")
        """Index of the token's source, one a token."""

        self._sources: list[Source] = []
        self._start = self._stop = 0
        """The tokens meant, of those in the columns."""

        if records:
            self._take(records)

    # ---- column by column ---------------------------------------------------------------------------

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids."""
        return tuple(self._ids[self._start : self._stop])

    @property
    def raw_logprobs(self) -> list[float]:
        """One a token; see ``TokenRecord``."""
        return self._log(0)

    @property
    def scaled_logprobs(self) -> list[float]:
        """One a token; see ``TokenRecord``."""
        return self._log(1)

    @property
    def target_logprobs(self) -> list[float]:
        """One a token; see ``TokenRecord``."""
        return self._log(2)

    @property
    def kept_logmasses(self) -> list[float]:
        """One a token; see ``TokenRecord``."""
        return self._log(3)

    @property
    def sources(self) -> list[Source]:
        """One a token."""
        return [self._sources[mark] for mark in self._marks[self._start : self._stop]]

    def _log(self, which: int) -> list[float]:
        return self._logs[_LOGS * self._start + which : _LOGS * self._stop : _LOGS].tolist()

    # ---- one by one ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> TokenRecord: ...

    @overload
    def __getitem__(self, index: slice) -> "Tokens": ...

    def __getitem__(self, index: int | slice) -> "TokenRecord | Tokens":
        here = range(self._start, self._stop)[index]
        if isinstance(here, range):
            return self._slice(here.start, here.stop) if here.step == 1 else Tokens(map(self._record, here))
        return self._record(here)

    def __iter__(self) -> Iterator[TokenRecord]:
        return map(self._record, range(self._start, self._stop))

    def _record(self, at: int) -> TokenRecord:
        """Return what stands at a place of the columns."""
        raw, scaled, target, kept = self._logs[_LOGS * at : _LOGS * (at + 1)]
        version, origin, drafter = self._sources[self._marks[at]]
        return TokenRecord(
            token_id=self._ids[at],
            raw_logprob=raw,
            scaled_logprob=scaled,
            target_logprob=target,
            kept_logmass=kept,
            policy_version=version,
            origin=origin,
            drafter=drafter,
        )

    def _slice(self, start: int, stop: int) -> "Tokens":
        """Return what stands between two places of the columns."""
        tokens = Tokens.__new__(Tokens)
        tokens._ids, tokens._logs, tokens._marks, tokens._sources = (
            self._ids,
            self._logs,
            self._marks,
            self._sources,
        )
        tokens._start, tokens._stop = start, max(start, stop)
        return tokens

    # ---- as a whole ---------------------------------------------------------------------------------

    def __add__(self, more: "Tokens") -> "Tokens":
        """Return these tokens and ``more``. What was cut from one log in two is joined without copying."""
        if self._ids is more._ids and self._stop == more._start:
            return self._slice(self._start, more._stop)
        if not len(self):
            return more
        joined = Tokens(self)
        joined._take(more)
        return joined

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            same = self._columns()[:2] == other._columns()[:2]
            return same and self.sources == other.sources
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a log of them grows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        columns = [column.tobytes() for column in self._columns()]
        return _unpickled, (type(self), *columns, [tuple(source) for source in self._sources])

    def _columns(self) -> "tuple[array[int], array[float], array[int]]":
        start, stop = self._start, self._stop
        return self._ids[start:stop], self._logs[_LOGS * start : _LOGS * stop], self._marks[start:stop]

    def _take(self, records: Iterable[TokenRecord]) -> None:
        """Append to the columns, of which this must be the only owner or a ``TokenLog``."""
        if isinstance(records, Tokens):
            ids, logs, marks = records._columns()
            if records._sources != self._sources[: len(records._sources)]:
                found = [self._mark(source) for source in records._sources]
                marks = array("H", [found[mark] for mark in marks])
            self._ids.extend(ids)
            self._logs.extend(logs)
            self._marks.extend(marks)
        else:
            for r in records:
                self._ids.append(r.token_id)
                self._logs.extend((r.raw_logprob, r.scaled_logprob, r.target_logprob, r.kept_logmass))
                self._marks.append(self._mark(_source_of(r)))
        self._stop = len(self._ids)

    def _mark(self, source: tuple[int, Origin, str]) -> int:
        """Return the index of a source."""
        try:
            return self._sources.index(source)  # type: ignore[arg-type]  # equal as tuples
        except ValueError:
            self._sources.append(Source(*source))
            return len(self._sources) - 1


class TokenLog(Tokens):
    """Tokens that grow. What was sliced off stays as it is."""

    __slots__ = ()

    def add(
        self,
        token_id: int,
        logs: Sequence[float],
        *,
        policy_version: int,
        origin: Origin,
        drafter: str,
    ) -> None:
        """Append a token. ``logs``: raw, scaled and target logprob, and the log of the kept mass."""
        self._ids.append(token_id)
        self._logs.extend(logs)
        self._marks.append(self._mark((policy_version, origin, drafter)))
        self._stop += 1

    def add_columns(self, ids: bytes, logs: bytes, source: Source) -> None:
        """Append tokens of one source: int32 ids, and four doubles a token as ``add`` takes them."""
        before = len(self._ids)
        self._ids.frombytes(ids)
        self._logs.frombytes(logs)
        self._stop = len(self._ids)
        self._marks.extend([self._mark(source)] * (self._stop - before))

    def extend(self, records: Iterable[TokenRecord]) -> None:
        """Append records."""
        self._take(records)

    def clear(self) -> None:
        """Drop all; what was sliced off keeps the old columns."""
        self.__init__()  # type: ignore[misc]


def _unpickled(
    kind: type[Tokens], ids: bytes, logs: bytes, marks: bytes, sources: list[tuple[int, Origin, str]]
) -> Tokens:
    tokens = kind.__new__(kind)
    tokens._ids, tokens._logs, tokens._marks = array("i", ids), array("d", logs), array("H", marks)
    tokens._sources = [Source(*source) for source in sources]
    tokens._start, tokens._stop = 0, len(tokens._ids)
    return tokens
