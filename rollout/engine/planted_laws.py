"""Known-wrong rounds, each a mistake some system has shipped. A check that cannot reject them proves nothing.

Every one changes a single step of the correct ``TinyRound``; the total variation it causes is exact.
Errors that live in the engine and not in the law (wrong KV position, stale weights) are planted there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rollout.engine.law_check import CAUGHT_TV, RULES, LawCase, Prefix, TinyModel, TinyRound, check_round
from rollout.engine.verify import Decisions
from rollout.types import SamplingParams


class ResumeFromTarget(TinyRound):
    """After a rejection samples from the target instead of the residual."""

    def verify(
        self, prefix: Prefix, drafts: list[int], draft_probs_GV: Tensor | None, decisions: Decisions
    ) -> list[int]:
        """Return the tokens the round emits."""
        return super().verify(
            prefix, drafts, draft_probs_GV, _TargetOnReject(self, prefix, drafts, decisions)
        )


class _TargetOnReject:
    """Decisions whose token after a rejection comes from the target."""

    def __init__(self, outer: TinyRound, prefix: Prefix, drafts: list[int], decisions: Decisions) -> None:
        self._outer, self._prefix, self._drafts, self._decisions = outer, prefix, drafts, decisions

    def accept(self, probability: float, *, slot: int) -> bool:
        """Implements ``Decisions.accept``."""
        return self._decisions.accept(probability, slot=slot)

    def sample(self, weights_V: Tensor, *, slot: int) -> int:
        """Implements ``Decisions.sample`` on the wrong weights."""
        row_V = self._outer.target_row((*self._prefix, *self._drafts[:slot]))
        return self._decisions.sample(row_V, slot=slot)


class BonusAfterRejection(TinyRound):
    """Emits the row after a rejected draft as well, as if the draft had been kept."""

    def verify(
        self, prefix: Prefix, drafts: list[int], draft_probs_GV: Tensor | None, decisions: Decisions
    ) -> list[int]:
        """Return the tokens the round emits."""
        emitted = super().verify(prefix, drafts, draft_probs_GV, decisions)
        kept = len(emitted) - 1
        if kept < len(drafts):
            row_V = self.target_row((*prefix, *drafts[: kept + 1]))
            emitted.append(decisions.sample(row_V, slot=kept + 1))
        return emitted


class ValueDependentTrim(TinyRound):
    """Drops drafts the drafter was unsure of, after looking at which tokens they are."""

    def draft(self, prefix: Prefix, decisions: Decisions) -> tuple[list[int], Tensor | None]:
        """Return drafts and the rows reported for them."""
        drafts, rows_GV = super().draft(prefix, decisions)
        assert rows_GV is not None, "this error needs sampled drafts"
        sure = [float(row_V[token]) > 0.5 for token, row_V in zip(drafts, rows_GV, strict=True)]
        kept = sure.index(False) if False in sure else len(drafts)
        return drafts[:kept], rows_GV[:kept] if kept else None


class FiltersOnDraftsOnly(TinyRound):
    """Filters the drafter's distribution but holds drafts against the unfiltered target."""

    def target_row(self, prefix: Prefix) -> Tensor:
        """Return the distribution verification holds drafts against."""
        return self.target.probs(prefix, self._unfiltered)

    _unfiltered = SamplingParams()


class ReportedNotSampled(TinyRound):
    """Draws drafts from the filtered distribution and reports the unfiltered one."""

    def reported(self, prefix: Prefix) -> Tensor:
        """Return the distribution the drafter says it drew from."""
        return self.drafter.probs(prefix, self._unfiltered)

    _unfiltered = SamplingParams()


class TemperatureMismatch(TinyRound):
    """Verifies at temperature 1 whatever the request asked for."""

    def target_row(self, prefix: Prefix) -> Tensor:
        """Return the distribution verification holds drafts against."""
        return self.target.probs(prefix, self._warm)

    _warm = SamplingParams(temperature=1.0)


class StaleDraftRows(TinyRound):
    """Draws drafts from a rebuilt drafter and reports the rows of the one before."""

    def __init__(self, case: LawCase) -> None:
        super().__init__(case)
        self._before = TinyModel(vocab_size=case.vocab_size, seed=2 * case.seed + 1000)

    def reported(self, prefix: Prefix) -> Tensor:
        """Return the distribution the drafter says it drew from."""
        # A little of the true row keeps every drafted token possible, so no check of the row can notice.
        return 0.9 * self._before.probs(prefix, self.draft_params) + 0.1 * self.drawn_from(prefix)


class UnsoundRowDropsAll(TinyRound):
    """Throws the whole block away when a later row turns out unusable: an accident of the first draft."""

    def draft(self, prefix: Prefix, decisions: Decisions) -> tuple[list[int], Tensor | None]:
        """Return drafts and the rows reported for them."""
        drafts, rows_GV = super().draft(prefix, decisions)
        broken = len(drafts) > 1 and drafts[0] == 0
        return ([], None) if broken else (drafts, rows_GV)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedCheck:
    """What enumeration says about one planted error."""

    name: str
    rule: str
    gamma: int
    tv: float
    """The exact total variation it causes over three tokens."""

    @property
    def caught(self) -> bool:
        """Whether it is told from a correct round."""
        return self.tv > CAUGHT_TV


PLANTED: dict[str, tuple[Callable[[LawCase], TinyRound], SamplingParams]] = {
    "resume from the target instead of the residual": (ResumeFromTarget, SamplingParams()),
    "bonus after a rejection": (BonusAfterRejection, SamplingParams()),
    "trim that looks at the draft": (ValueDependentTrim, SamplingParams()),
    "filters on the drafts only": (FiltersOnDraftsOnly, SamplingParams(top_k=2)),
    "reported distribution is not the sampled one": (ReportedNotSampled, SamplingParams(top_k=3)),
    "temperature mismatch": (TemperatureMismatch, SamplingParams(temperature=0.6)),
    "draft rows of an older drafter": (StaleDraftRows, SamplingParams()),
    "a later unsound row drops earlier drafts": (UnsoundRowDropsAll, SamplingParams()),
}
"""Every planted error, with params under which it shows."""


def check_planted(name: str, *, rule: str, gamma: int = 2, vocab_size: int = 4) -> PlantedCheck:
    """Enumerate one planted error."""
    if rule not in ("token", "block"):
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    build, params = PLANTED[name]
    case = LawCase(
        rule="token" if rule == "token" else "block",
        gamma=gamma,
        vocab_size=vocab_size,
        params=params,
        seed=7,
    )
    return PlantedCheck(name=name, rule=rule, gamma=gamma, tv=check_round(build(case)).tv)


def planted_checks() -> Iterator[PlantedCheck]:
    """Enumerate every planted error under both rules."""
    for name in PLANTED:
        for rule in RULES:
            yield check_planted(name, rule=rule)
