"""When to look again at what the current choice does not show: a drafter, or plain decoding of a batch.

A drafter is named by its name, plain decoding by the bucket of its batch (``tracking.bucket_of``).
"""

from collections import Counter
from collections.abc import Iterable

EARLY_LOOKS = 4
"""Looks at a drafter, or at plain decoding of a batch, that come early."""

EARLY_SHARE = 4
"""How many times shorter the wait for an early look is."""

What = str | int


class LookTimes:
    """Remembers in which round each was last seen, and how often. Rounds are counted by the caller."""

    def __init__(self, drafters: Iterable[str], *, probe_rounds: int, check_rounds: int) -> None:
        """Drafters count as seen in round 0. ``probe_rounds`` lie between looks at a drafter,
        ``check_rounds`` between looks at plain decoding."""
        self._probe_rounds, self._check_rounds = probe_rounds, check_rounds
        self._seen: dict[What, int] = dict.fromkeys(drafters, 0)
        self._looks: Counter[What] = Counter()

    def begin(self, bucket: int, round_: int) -> None:
        """Let plain decoding of a batch count as seen in a round, if it never was."""
        self._seen.setdefault(bucket, round_)

    def looked(self, what: What, round_: int) -> None:
        """Hear that a round was chosen to look at it."""
        self._seen[what] = round_

    def observed(self, what: What, round_: int, *, surprised: bool) -> None:
        """Hear that it was seen at work. After a surprise the next looks come early."""
        self._seen[what] = round_
        self._looks[what] = 0 if surprised else self._looks[what] + 1

    def demand(self, bucket: int, round_: int) -> None:
        """Make a look at plain decoding of a batch due now."""
        self._seen[bucket] = round_ - self._check_rounds

    def last_seen(self, drafter: str) -> int:
        """Return the round in which a drafter was last seen."""
        return self._seen[drafter]

    def probe_round(self, drafter: str) -> int:
        """Return the round in which a drafter is to be looked at again."""
        return self._seen[drafter] + self._wait(drafter, self._probe_rounds)

    def check_round(self, bucket: int, round_: int) -> int:
        """Return the round in which plain decoding of a batch is to be looked at again, one never seen as if
        it had been in ``round_``."""
        return self._seen.get(bucket, round_) + self._wait(bucket, self._check_rounds)

    def _wait(self, what: What, rounds: int) -> int:
        return rounds if self._looks[what] >= EARLY_LOOKS else max(1, rounds // EARLY_SHARE)
