"""How many draft tokens survive, per drafter, position and sequence.

State: per drafter and position the times it was tried and the times it was kept. Position j of a round is
tried only when it was drafted, all before it were kept, and its fate was seen: a round cut by a stop or a
limit says nothing about the positions behind the cut. Nothing here ever sees a token.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.config import ControllerConfig
from controller.types import SequenceOutcome

Floats = NDArray[np.float64]

SURE_FRAC = 0.999
"""No finite evidence makes a draft token certain; also keeps its logarithm away from 0."""

HOPELESS_FRAC = 0.001
"""And none makes it impossible."""

RECENT_TOKENS = 32.0
"""Memory of the recent evidence that the remembered one is compared with, in draft tokens."""

RECENT_MIN_TOKENS = 6.0
"""Fewest recent draft tokens that may overrule what is remembered: two or three probes."""

SEQUENCE_WINDOW_TOKENS = 96.0
"""Memory of one sequence: text turns from easy to hard within paragraphs."""

SEQUENCE_RANGE = (0.25, 4.0)
"""How far a sequence's hazard may differ from its drafter's mean, as a factor."""


def tried_and_kept(outcome: SequenceOutcome) -> tuple[int, int]:
    """Return how many positions of a round were tried and how many of them kept.

    A rejection was seen when the target's own token stands in the draft's place, or when nothing cut the
    round. Otherwise the round ended at a kept draft and the next position was never tried.
    """
    kept = outcome.accepted
    rejected = kept < outcome.gamma and (outcome.committed > kept or not outcome.censored)
    return kept + rejected, kept


@dataclass(slots=True)
class _Sequence:
    """What one sequence did under one drafter, against what its drafter's mean expected."""

    tried: float = 0.0
    kept: float = 0.0
    expected: float = 0.0


class _Drafter:
    """Evidence about one drafter. The prior is counted as evidence, so it fades like the rest."""

    def __init__(self, config: ControllerConfig, *, positions: int) -> None:
        self._config = config
        share = config.prior_tokens / positions
        self.tried = np.full(positions, share)
        self.kept = self.tried * config.prior_acceptance
        self._recent_tried = np.zeros(positions)
        self._recent_kept = np.zeros(positions)
        self.sequences: dict[int, _Sequence] = {}
        self.seen_tokens = 0
        self._hazard: Floats | None = None
        self._log_survival: Floats | None = None

    @property
    def positions(self) -> int:
        return len(self.tried)

    @property
    def mean(self) -> float:
        """Pooled chance that a tried draft token is kept."""
        share = float(self.kept.sum()) / float(self.tried.sum())
        return min(SURE_FRAC, max(HOPELESS_FRAC, share))

    @property
    def hazard(self) -> Floats:
        """Chance per position that it is kept, given that all before it were."""
        if self._hazard is None:
            lean = self._config.position_prior_tokens
            raw = (lean * self.mean + self.kept) / (lean + self.tried)
            self._hazard = np.clip(raw, HOPELESS_FRAC, SURE_FRAC)
        return self._hazard

    @property
    def log_survival(self) -> Floats:
        if self._log_survival is None:
            self._log_survival = np.cumsum(np.log(self.hazard))
        return self._log_survival

    def observe(self, outcome: SequenceOutcome, *, probing: bool) -> None:
        tried, kept = tried_and_kept(outcome)
        tried, kept = min(tried, self.positions), min(kept, self.positions)
        if tried == 0:
            return
        self._observe_sequence(outcome, tried, kept)
        self.seen_tokens += tried
        fade = math.exp(-tried / self._config.acceptance_window_tokens)
        recent_fade = math.exp(-tried / RECENT_TOKENS)
        for counts, factor in (
            (self.tried, fade),
            (self.kept, fade),
            (self._recent_tried, recent_fade),
            (self._recent_kept, recent_fade),
        ):
            counts *= factor
        self.tried[:tried] += 1.0
        self.kept[:kept] += 1.0
        self._recent_tried[:tried] += 1.0
        self._recent_kept[:kept] += 1.0
        if probing:
            self._replace_if_changed()
        self._hazard = self._log_survival = None

    def _replace_if_changed(self) -> None:
        """Drop the memory when a few probes contradict it by more than chance allows."""
        recent = float(self._recent_tried.sum())
        if recent < RECENT_MIN_TOKENS:
            return
        mean = self.mean
        spread = math.sqrt(mean * (1.0 - mean) / recent)
        if abs(float(self._recent_kept.sum()) / recent - mean) > self._config.change_z * spread:
            self.tried[:] = self._recent_tried
            self.kept[:] = self._recent_kept

    def _observe_sequence(self, outcome: SequenceOutcome, tried: int, kept: int) -> None:
        if outcome.finished:
            self.sequences.pop(outcome.key, None)
            return
        one = self.sequences.setdefault(outcome.key, _Sequence())
        fade = math.exp(-tried / SEQUENCE_WINDOW_TOKENS)
        one.tried = one.tried * fade + tried
        one.kept = one.kept * fade + kept
        one.expected = one.expected * fade + float(self.hazard[:tried].sum())

    def factor(self, key: int) -> float:
        """Return the sequence's power: its survival is the drafter's survival to this power."""
        one = self.sequences.get(key)
        if one is None:
            return 1.0
        lean = self._config.sequence_prior_tokens
        total, prior = lean + one.tried, lean * self.mean
        own = min(SURE_FRAC, max(HOPELESS_FRAC, (prior + one.kept) / total))
        usual = min(SURE_FRAC, max(HOPELESS_FRAC, (prior + one.expected) / total))
        low, high = SEQUENCE_RANGE
        return min(high, max(low, math.log(own) / math.log(usual)))

    def discount(self) -> None:
        """Keep part of the evidence and fill up with the prior: a new policy may differ."""
        kept_share = self._config.version_discount
        fresh = (1.0 - kept_share) * self._config.prior_tokens / self.positions
        self.tried[:] = self.tried * kept_share + fresh
        self.kept[:] = self.kept * kept_share + fresh * self._config.prior_acceptance
        self._recent_tried[:] = 0.0
        self._recent_kept[:] = 0.0
        self.sequences.clear()
        self._hazard = self._log_survival = None


class AcceptanceModel:
    """Survival of draft tokens for every drafter an engine has."""

    def __init__(self, config: ControllerConfig, max_gammas: Mapping[str, int]) -> None:
        self._drafters = {name: _Drafter(config, positions=g) for name, g in max_gammas.items()}

    def observe(self, outcomes: Iterable[SequenceOutcome], *, probing: bool = False) -> None:
        """Take one round's outcomes. ``probing``: its drafts were there only to be seen."""
        for outcome in outcomes:
            drafter = self._drafters.get(outcome.drafter)
            if drafter is not None and outcome.gamma > 0:
                drafter.observe(outcome, probing=probing)
            if outcome.finished:
                self.forget(outcome.key)

    def policy_changed(self) -> None:
        """Discount everything learnt under the old version."""
        for drafter in self._drafters.values():
            drafter.discount()

    def forget(self, key: int) -> None:
        """Drop what is known about one sequence."""
        for drafter in self._drafters.values():
            drafter.sequences.pop(key, None)

    def keep_only(self, keys: Iterable[int], *, most: int) -> None:
        """Bound memory: once more than ``most`` sequences are remembered, keep those of ``keys``."""
        for drafter in self._drafters.values():
            if len(drafter.sequences) > most:
                alive = set(keys)
                drafter.sequences = {k: v for k, v in drafter.sequences.items() if k in alive}

    def survival(self, drafter: str, keys: Sequence[int]) -> Floats:
        """Return (len(keys), positions): the chance that a draft token at each position is kept."""
        one = self._drafters[drafter]
        if not one.sequences:
            return np.exp(np.broadcast_to(one.log_survival, (len(keys), one.positions)))
        powers = np.asarray([one.factor(key) for key in keys])
        return np.exp(powers[:, None] * one.log_survival)

    def expected_accepted(self, drafter: str, gamma: int, key: int | None = None) -> float:
        """Return the draft tokens of ``gamma`` expected to be kept, for one sequence or a new one."""
        one = self._drafters[drafter]
        power = 1.0 if key is None else one.factor(key)
        return float(np.exp(power * one.log_survival[:gamma]).sum())

    def mean(self, drafter: str) -> float:
        """Return the pooled chance that a tried draft token is kept."""
        return self._drafters[drafter].mean

    def seen_tokens(self, drafter: str) -> int:
        """Return how many draft tokens were ever tried."""
        return self._drafters[drafter].seen_tokens

    def hazard(self, drafter: str) -> tuple[float, ...]:
        """Return the chance per position that it is kept, given that all before it were."""
        return tuple(float(h) for h in self._drafters[drafter].hazard)
