"""What looking around may cost: a share of time, earned by running and spent by looking."""

from collections import deque

from controller.types import RoundFacts

MEMORY_S = 20.0
"""Time whose unspent budget is kept: what was saved over minutes is not spent in one tail. A look that costs
more than all of that may still be saved for: what it would show cannot be known otherwise."""

START_S = 2.0
"""Time whose budget is there from the start: how wrong a calibration is shows in the first looks at what
it says does not pay. Not under one that was found good and agreed with forwards taken again at this start."""

STREAK_ROUNDS = 4
"""Speculative rounds in a row that are compared with plain decoding just before: fewer are noise."""

PACE_FADE = 0.75
"""Weight kept per plain round by the pace of plain decoding: a few rounds are averaged, of seconds ago."""


SURPRISE_SHARE = 0.25
"""Share of an exploring round that may be charged beyond what was expected of it. A drafter unused for long
is found cold: its first pass makes a round a third longer than predicted, every time."""


USUAL_LOOKS = 2
"""Looks in a row that lost more than expected before the next one is expected to: one may have stalled."""


class Pace:
    """Tokens per second as measured, plain decoding's beside that of the speculation that took its place.

    No model stands in between: whatever a price was wrong by, a streak slower than what it replaced shows it.
    The machine may have become slower meanwhile, so it is a reason to look, not to decide.
    """

    def __init__(self) -> None:
        self._plain_per_s: dict[int, float] = {}
        self._bucket = -1
        self._rounds = 0
        self._tokens = self._seconds = 0.0

    def disappoints(self, facts: RoundFacts, bucket: int, *, speculated: bool) -> bool:
        """Take a round of a batch's bucket; return whether a streak ends slower than plain decoding."""
        if bucket != self._bucket or not speculated or facts.prefill_rows:
            self._bucket, self._rounds, self._tokens, self._seconds = bucket, 0, 0.0, 0.0
        if facts.prefill_rows or facts.total_s <= 0.0:
            return False
        if not speculated:
            pace = facts.decoded / facts.total_s
            old = self._plain_per_s.get(bucket, pace)
            self._plain_per_s[bucket] = PACE_FADE * old + (1.0 - PACE_FADE) * pace
            return False
        self._rounds += 1
        self._tokens += facts.decoded
        self._seconds += facts.total_s
        if self._rounds < STREAK_ROUNDS or bucket not in self._plain_per_s:
            return False
        slower = self._tokens < self._plain_per_s[bucket] * self._seconds
        self._rounds, self._tokens, self._seconds = 0, 0.0, 0.0
        return slower


class ExploreBudget:
    """Seconds that exploring rounds may still lose against the best plan known."""

    def __init__(self, share: float, *, start_s: float = START_S) -> None:
        """``share`` of the time may be lost, that of ``start_s`` seconds at once."""
        self._share = share
        self._credit_s = share * start_s
        self._wanted_s = 0.0
        self._expected_loss_s = self._usual_s = 0.0
        self._best_per_s = 0.0
        self._surprises_s: deque[float] = deque([0.0] * USUAL_LOOKS, maxlen=USUAL_LOOKS)
        """What the latest looks lost beyond the losses expected of them."""
        self.lost_s = 0.0

    def earn(self, seconds: float) -> None:
        """Hear that a round took ``seconds``."""
        most_s = max(self._share * MEMORY_S, self._wanted_s)
        self._credit_s = min(most_s, self._credit_s + self._share * seconds)

    def afford(self, loss_s: float, best_per_s: float) -> bool:
        """Return whether an exploring round with this expected loss may run, and charge it if so.

        ``best_per_s`` is the tokens per second of the plan it replaces. What looks lost lately beyond their
        prediction is expected of this one, too.
        """
        usual_s = max(0.0, min(self._surprises_s))
        loss_s = max(0.0, loss_s) + usual_s
        if loss_s > self._credit_s:
            self._wanted_s = loss_s
            return False
        self._wanted_s = 0.0
        self._expected_loss_s, self._usual_s, self._best_per_s = loss_s, usual_s, best_per_s
        self._charge(loss_s)
        return True

    def settle(self, seconds: float, tokens: int) -> None:
        """Charge what the exploring round lost beyond its prediction, as much again or ``SURPRISE_SHARE`` of
        the round at most: a stall is not its fault."""
        if self._best_per_s:
            surprise_s = seconds - tokens / self._best_per_s - self._expected_loss_s
            self._surprises_s.append(surprise_s + self._usual_s)
            self._charge(min(max(0.0, surprise_s), max(self._expected_loss_s, SURPRISE_SHARE * seconds)))
        self._expected_loss_s = self._best_per_s = 0.0

    def _charge(self, seconds: float) -> None:
        self._credit_s -= seconds
        self.lost_s += seconds
