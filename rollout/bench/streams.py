"""What whoever streams a run's texts sees: when tokens come, and how many at once.

Times are those of the run's own clock. A row is submitted when the engine gets it, so nothing here waits for
a free place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.engine.protocol import RoundOutcome
from rollout.report.statistics import quantile

Key = tuple[str, int]


@dataclass(kw_only=True, slots=True)
class StreamTimes:
    """The streams of one run, or of several."""

    first_token_s: list[float] = field(default_factory=list)
    """By row that got one: from its submission to its first token."""

    end_to_end_s: list[float] = field(default_factory=list)
    """By row that ended: from its submission to its end."""

    events: int = 0
    """Emissions: one per sequence and round that committed something for it; of plain rounds by column, one
    once in ``engine.emit_s``."""

    tokens: int = 0
    _since_s: dict[Key, float] = field(default_factory=dict)
    """By row under way, when it was submitted."""

    def submitted(self, keys: Sequence[Key], *, at_s: float) -> None:
        """Hear that the engine has got these rows."""
        self._since_s.update(dict.fromkeys(keys, at_s))

    def round(self, outcome: RoundOutcome, *, at_s: float) -> None:
        """Hear what a round that has just ended brought."""
        for emission in outcome.emissions:
            self.events += 1
            self.tokens += len(emission.tokens)
            if emission.first_index == 0:
                self.first_token_s.append(at_s - self._since_s[emission.key])
        for completion in outcome.completions:
            since_s = self._since_s.pop((completion.prompt_uid, completion.sample_index))
            self.end_to_end_s.append(at_s - since_s)

    @classmethod
    def merged(cls, runs: Sequence["StreamTimes"]) -> "StreamTimes":
        """Return the streams of several runs as one."""
        return cls(
            first_token_s=[s for run in runs for s in run.first_token_s],
            end_to_end_s=[s for run in runs for s in run.end_to_end_s],
            events=sum(run.events for run in runs),
            tokens=sum(run.tokens for run in runs),
        )

    def told(self) -> Mapping[str, float | int | None]:
        """Return the numbers a result keeps: medians and 95% quantiles in seconds, None without any."""
        return {
            "rows": len(self.end_to_end_s),
            "first_token_p50_s": _quantile(self.first_token_s, 0.5),
            "first_token_p95_s": _quantile(self.first_token_s, 0.95),
            "end_to_end_p50_s": _quantile(self.end_to_end_s, 0.5),
            "end_to_end_p95_s": _quantile(self.end_to_end_s, 0.95),
            "events": self.events,
            "tokens_per_event": self.tokens / self.events if self.events else None,
        }


def _quantile(values: Sequence[float], fraction: float) -> float | None:
    return quantile(values, fraction) if values else None
