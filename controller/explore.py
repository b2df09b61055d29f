"""What looking around may cost: a share of time, earned by running and spent by probes and checks."""

MEMORY_S = 20.0
"""Time whose unspent budget is kept: what was saved over minutes is not spent in one tail. A look that costs
more than all of that may still be saved for: what it would show cannot be known otherwise."""

START_S = 2.0
"""Time whose budget is there from the start: how wrong a calibration is shows in the first looks at what
it says does not pay."""


class ExploreBudget:
    """Seconds that exploring rounds may still lose against the best plan known."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_s = share * START_S
        self._wanted_s = 0.0
        self._expected_loss_s = 0.0
        self._best_per_s = 0.0
        self.lost_s = 0.0

    def earn(self, seconds: float) -> None:
        """Hear that a round took ``seconds``."""
        most_s = max(self._share * MEMORY_S, self._wanted_s)
        self._credit_s = min(most_s, self._credit_s + self._share * seconds)

    def afford(self, loss_s: float, best_per_s: float) -> bool:
        """Return whether an exploring round with this expected loss may run, and charge it if so.

        ``best_per_s`` is the tokens per second of the plan it replaces.
        """
        loss_s = max(0.0, loss_s)
        if loss_s > self._credit_s:
            self._wanted_s = loss_s
            return False
        self._wanted_s = 0.0
        self._expected_loss_s, self._best_per_s = loss_s, best_per_s
        self._charge(loss_s)
        return True

    def settle(self, seconds: float, tokens: int) -> None:
        """Charge what the exploring round lost beyond its prediction, once more that much at most: a stall
        is not its fault."""
        if self._best_per_s:
            surprise_s = seconds - tokens / self._best_per_s - self._expected_loss_s
            self._charge(min(max(0.0, surprise_s), self._expected_loss_s))
        self.let_go()

    def let_go(self) -> None:
        """Charge nothing beyond the prediction."""
        self._expected_loss_s = self._best_per_s = 0.0

    def _charge(self, seconds: float) -> None:
        self._credit_s -= seconds
        self.lost_s += seconds
