"""How many draft tokens survive, per drafter, position and sequence.

State: per drafter and position the times it was tried and the times it was kept. Position j of a round is
tried only when it was drafted, all before it were kept, and its fate was seen: a round cut by a stop or a
limit says nothing about the positions behind the cut. Draft tokens that were judged singly all count for the
first position. Nothing here ever sees a token.
"""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from controller.config import ControllerConfig
from controller.types import SequenceOutcome

Floats = NDArray[np.float64]

SURE_FRAC = 0.999
"""No finite evidence makes a draft token certain; also keeps its logarithm away from 0."""

HOPELESS_FRAC = 0.001
"""And none makes it impossible."""

RECENT_TOKENS = 16.0
"""Memory of the recent evidence that the remembered one is compared with, in draft tokens: eight probes."""

RECENT_MIN_TOKENS = 6.0
"""Fewest recent draft tokens that may overrule what is remembered: two or three probes."""

SEQUENCE_WINDOW_TOKENS = 96.0
"""Memory of one sequence: text turns from easy to hard within paragraphs."""

NOTHING_SHARED: Mapping[str, float] = MappingProxyType({})

_SEQUENCE_FADE = [math.exp(-t / SEQUENCE_WINDOW_TOKENS) for t in range(65)]

SEQUENCE_RANGE = (0.25, 4.0)
"""How far a sequence's hazard may differ from its drafter's mean, as a factor."""


SHALLOWER_TOKENS = 24.0
"""Draft tokens by which a drafter that runs more of the policy leans on what one that runs less showed."""


def tried_and_kept(outcome: SequenceOutcome) -> tuple[int, int]:
    """Return how many positions of a round were tried and how many of them kept.

    A rejection was seen when the target's own token stands in the draft's place, or when nothing cut the
    round. Otherwise the round ended at a kept draft and the next position was never tried.
    """
    kept = outcome.accepted
    if outcome.judged_singly:
        # What a cut left uncommitted was tried as well, but nobody counted it as kept.
        return (max(kept, min(outcome.gamma, outcome.committed)) if outcome.censored else outcome.gamma), kept
    rejected = kept < outcome.gamma and (outcome.committed > kept or not outcome.censored)
    return kept + rejected, kept


@dataclass(slots=True)
class _Sequence:
    """What one sequence did under one drafter, all positions together."""

    tried: float = 0.0
    kept: float = 0.0


class _Counts:
    """Fading counts of rounds by positions tried and positions kept, O(1) per round.

    Instead of shrinking the past, new rounds weigh more; a position's count is the sum over all rounds
    that reached it.
    """

    def __init__(self, positions: int, *, window_tokens: float) -> None:
        self._growth = [math.exp(t / window_tokens) for t in range(positions + 1)]
        self._weight = 1.0
        self._tried = [0.0] * (positions + 1)
        self._kept = [0.0] * (positions + 1)

    def add(self, tried: int, kept: int) -> None:
        self._weight *= self._growth[tried]
        self._tried[tried] += self._weight
        self._kept[kept] += self._weight
        self._limit()

    def _limit(self) -> None:
        if self._weight > 1e9:
            self._rescale(1.0 / self._weight)
            self._weight = 1.0

    def add_singly(self, tried: int, kept: int) -> None:
        """Add draft tokens that each stood first."""
        self._weight *= self._growth[min(tried, len(self._growth) - 1)]
        self._tried[1] += tried * self._weight
        self._kept[1] += kept * self._weight
        self._limit()

    def add_evenly(self, per_position: float, acceptance: float) -> None:
        """Add a prior: every position tried equally often."""
        self._tried[-1] += per_position * self._weight
        self._kept[-1] += per_position * acceptance * self._weight

    def _rescale(self, factor: float) -> None:
        self._tried = [t * factor for t in self._tried]
        self._kept = [k * factor for k in self._kept]

    def discount(self, share: float) -> None:
        self._rescale(share)

    def clear(self) -> None:
        self._rescale(0.0)

    def become(self, other: "_Counts") -> None:
        """Take over the evidence of ``other``."""
        factor = self._weight / other._weight
        self._tried = [t * factor for t in other._tried]
        self._kept = [k * factor for k in other._kept]

    def totals(self) -> tuple[float, float]:
        """Return draft tokens tried and kept, over all positions."""
        tried = sum(i * t for i, t in enumerate(self._tried))
        kept = sum(i * k for i, k in enumerate(self._kept))
        return tried / self._weight, kept / self._weight

    def by_position(self) -> tuple[list[float], list[float]]:
        """Return draft tokens tried and kept at each position, the first at index 0."""

        def reaching(rounds: list[float]) -> list[float]:
            return [r / self._weight for r in accumulate(reversed(rounds[1:]))][::-1]

        return reaching(self._tried), reaching(self._kept)


class _Drafter:
    """Evidence about one drafter. The prior is counted as evidence, so it fades like the rest."""

    def __init__(
        self,
        config: ControllerConfig,
        *,
        positions: int,
        copies: bool,
        hoped: bool,
        shallower: "tuple[_Drafter, float] | None" = None,
    ) -> None:
        """``shallower`` is a drafter that runs less of the policy, and the share of its wrong tokens that
        this one should still get wrong."""
        self._config = config
        self._shallower = shallower
        self._deeper: list[_Drafter] = []
        if shallower is not None:
            shallower[0]._deeper.append(self)
        self._prior_acceptance = config.prior_acceptance_copied if copies else config.prior_acceptance
        self._hope_errors = config.hope_errors if hoped else 0.0
        self.positions = positions
        self._memory = _Counts(positions, window_tokens=config.acceptance_window_tokens)
        self._memory.add_evenly(config.prior_tokens / positions, self._prior_acceptance)
        self._recent = _Counts(positions, window_tokens=RECENT_TOKENS)
        self.sequences: dict[int, _Sequence] = {}
        self.seen_tokens = 0
        self.survivals: list[float] = []
        self._stale = True
        self._refresh()

    def _changed(self) -> None:
        """Have what reading needs worked out again, also for those that lean on it."""
        self._stale = True
        for deeper in self._deeper:
            deeper._changed()

    def _refresh(self) -> None:
        """Work out everything that reading needs, once per change."""
        if not self._stale:
            return
        self._stale = False
        tried, kept = self._memory.totals()
        self._mean = _clip(kept / tried)
        # Little evidence is met with hope: one standard error beyond that of a full memory. What it
        # costs is bounded by the evidence it brings; a wrong fear would stay until the next probes.
        shy = 1.0 / math.sqrt(tried) - 1.0 / math.sqrt(self._config.acceptance_window_tokens)
        hope = self._hope_errors * math.sqrt(self._mean * (1.0 - self._mean)) * max(0.0, shy)
        lean = self._config.position_prior_tokens
        self._hazards = [
            _clip((lean * self._mean + k) / (lean + t) + hope)
            for t, k in zip(*self._memory.by_position(), strict=True)
        ]
        if self._shallower is not None:
            lean = SHALLOWER_TOKENS / (SHALLOWER_TOKENS + tried)
            self._hazards = [
                own + lean * max(0.0, _clip(least) - own)
                for own, least in zip(self._hazards, self._at_least(), strict=True)
            ]
        self.survivals = list(accumulate(self._hazards, operator.mul))
        self._logs = [math.log(share) for share in self.survivals]
        self._log_survival = np.asarray(self._logs)

    def _at_least(self) -> list[float]:
        """Return per position what the shallower drafter's chance makes of this one's."""
        assert self._shallower is not None
        shallower, wrong_share = self._shallower
        hazards = shallower.hazards
        last = len(hazards) - 1
        return [1.0 - wrong_share * (1.0 - hazards[min(i, last)]) for i in range(self.positions)]

    @property
    def mean(self) -> float:
        """Pooled chance that a tried draft token is kept."""
        self._refresh()
        return self._mean

    @property
    def hazards(self) -> list[float]:
        """Chance per position that it is kept, given that all before it were; hope included."""
        self._refresh()
        return self._hazards

    @property
    def log_survival(self) -> Floats:
        """Log of the chance that all up to a position are kept."""
        self._refresh()
        return self._log_survival

    @property
    def evidence_tokens(self) -> float:
        """Draft tokens the memory is worth."""
        return self._memory.totals()[0]

    def expected(self, gamma: int, key: int | None) -> float:
        """Return how many of ``gamma`` draft tokens are kept on average."""
        self._refresh()
        power = self.factor(key) if key in self.sequences and key is not None else 1.0
        if power == 1.0:
            return sum(self.survivals[:gamma])
        return sum(math.exp(power * log) for log in self._logs[:gamma])

    def observe(self, outcome: SequenceOutcome, *, probing: bool) -> None:
        tried, kept = tried_and_kept(outcome)
        if not outcome.judged_singly:
            tried, kept = min(tried, self.positions), min(kept, self.positions)
        if tried == 0:
            return
        self.seen_tokens += tried
        for counts in (self._memory, self._recent):
            (counts.add_singly if outcome.judged_singly else counts.add)(tried, kept)
        if probing:
            self._replace_if_changed()
        if not outcome.finished:
            one = self.sequences.get(outcome.key)
            if one is None:
                one = self.sequences[outcome.key] = _Sequence()
            fade = _SEQUENCE_FADE[min(tried, len(_SEQUENCE_FADE) - 1)]
            one.tried = one.tried * fade + tried
            one.kept = one.kept * fade + kept
        self._changed()

    def _replace_if_changed(self) -> None:
        """Drop the memory when a few probes contradict it by more than chance allows."""
        recent, recent_kept = self._recent.totals()
        tried, kept = self._memory.totals()
        if recent < RECENT_MIN_TOKENS:
            return
        mean = _clip(kept / tried)
        spread = math.sqrt(mean * (1.0 - mean) / recent)
        if abs(recent_kept / recent - mean) > self._config.change_z * spread:
            self._memory.become(self._recent)

    def factor(self, key: int) -> float:
        """Return the sequence's power: its survival is the drafter's survival to this power."""
        one = self.sequences.get(key)
        if one is None:
            return 1.0
        lean = self._config.sequence_prior_tokens
        # Against the mean as it stands, not as it stood: an early wrong hope is no fault of the sequence.
        own = _clip((lean * self._mean + one.kept) / (lean + one.tried))
        low, high = SEQUENCE_RANGE
        return min(high, max(low, math.log(own) / math.log(self._mean)))

    def factors(self, keys: Sequence[int]) -> Floats:
        """Return ``factor`` of many sequences at once."""
        get = self.sequences.get
        seen = [(one.kept, one.tried) if (one := get(key)) is not None else (0.0, 0.0) for key in keys]
        kept_tried = np.asarray(seen)
        lean = self._config.sequence_prior_tokens
        own = (lean * self._mean + kept_tried[:, 0]) / (lean + kept_tried[:, 1])
        powers = np.log(np.minimum(np.maximum(own, HOPELESS_FRAC), SURE_FRAC)) / math.log(self._mean)
        low, high = SEQUENCE_RANGE
        return np.asarray(np.minimum(np.maximum(powers, low), high))

    def discount(self) -> None:
        """Keep part of the evidence and fill up with the prior: a new policy may differ."""
        share = self._config.version_discount
        self._memory.discount(share)
        fresh = (1.0 - share) * self._config.prior_tokens / self.positions
        self._memory.add_evenly(fresh, self._prior_acceptance)
        self._recent.clear()
        self.sequences.clear()
        self._changed()


def _clip(share: float) -> float:
    return min(SURE_FRAC, max(HOPELESS_FRAC, share))


class AcceptanceModel:
    """Survival of draft tokens for every drafter an engine has."""

    def __init__(
        self,
        config: ControllerConfig,
        max_gammas: Mapping[str, int],
        *,
        copying: Collection[str] = (),
        pipelines: Collection[str] = (),
        reuse_frac: Mapping[str, float] = NOTHING_SHARED,
    ) -> None:
        """``copying`` names the drafters that run no model, ``pipelines`` those whose first round only fills
        them: a wrong hope costs more there, and the prior alone has them tried where they gain much.

        ``reuse_frac`` tells of drafters that are the policy, stopped early, what share of it they run. One
        that runs more of it is taken to be wrong the less often for it, until it was seen itself.
        """
        unhoped = {*copying, *pipelines}
        self._drafters: dict[str, _Drafter] = {}
        shallower: tuple[str, float] | None = None
        for name in sorted(max_gammas, key=lambda name: reuse_frac.get(name, 0.0)):
            share = reuse_frac.get(name, 0.0)
            self._drafters[name] = _Drafter(
                config,
                positions=max_gammas[name],
                copies=name in copying,
                hoped=name not in unhoped,
                shallower=(
                    None
                    if shallower is None
                    else (self._drafters[shallower[0]], (1.0 - share) / (1.0 - shallower[1]))
                ),
            )
            if share:
                shallower = name, share
        self._drafters = {name: self._drafters[name] for name in max_gammas}

    def observe(self, outcomes: Iterable[SequenceOutcome], *, probing: bool = False) -> None:
        """Take one round's outcomes. ``probing``: its drafts were there only to be seen."""
        for outcome in outcomes:
            if outcome.gamma > 0:
                drafter = self._drafters.get(outcome.drafter)
                if drafter is not None:
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
        log_survival = one.log_survival
        if not one.sequences:
            return np.exp(np.broadcast_to(log_survival, (len(keys), one.positions)))
        return np.exp(one.factors(keys)[:, None] * log_survival)

    def expected_accepted(self, drafter: str, gamma: int, key: int | None = None) -> float:
        """Return the draft tokens of ``gamma`` expected to be kept, for one sequence or a new one."""
        return self._drafters[drafter].expected(gamma, key)

    def mean(self, drafter: str) -> float:
        """Return the pooled chance that a tried draft token is kept."""
        return self._drafters[drafter].mean

    def seen_tokens(self, drafter: str) -> int:
        """Return how many draft tokens were ever tried."""
        return self._drafters[drafter].seen_tokens

    def evidence_tokens(self, drafter: str) -> float:
        """Return how many draft tokens what is remembered is worth, prior included."""
        return self._drafters[drafter].evidence_tokens

    def hazard(self, drafter: str) -> tuple[float, ...]:
        """Return the chance per position that it is kept, given that all before it were, as plans use it."""
        return tuple(self._drafters[drafter].hazards)
