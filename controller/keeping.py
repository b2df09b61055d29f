"""When the last plan stands: planning every round would cost percents of the short ones.

A plan stands for a time, unless the batch changes; then it is questioned, and made anew when anything it was
made from changed: the sequences, what drafters have ready for free, a drafter's evidence, a look that is due.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controller.acceptance import AcceptanceModel
from controller.types import Assignment, RoundLoad, RoundPlan

PLAN_S = 2.2e-3
"""What working out one plan takes in Python, a few dozen array operations: used to ration planning.
Twice what it takes in a loop: between forwards, which read all weights, its code and data are found cold."""

UNCHANGED_PATIENCE = 4.0
"""How much longer a plan is repeated when neither the sequences nor what is ready for them changed much."""

FAR_GAIN = -0.06
"""Predicted gain below which plain decoding is far from being beaten."""

FAR_PATIENCE = 4.0
"""How much longer plain decoding stands then, unless more is ready for free: nothing is to be gained soon,
and what thinking costs is all that a controller costs."""

PLAIN_PATIENCE = 2.0
"""The same for plain decoding that is near: what is gained by speculating a little sooner is little."""

BATCH_CHANGE = 0.25
"""Relative change of the batch that is planned for at once: sequences fewer, more, or others. A batch that
decodes plainly and only grew is no such change, nor are others in place of some that all decoded alike."""

PLAIN_STANDS = 0.1
"""Share of the usual time for which plain decoding stands whatever the batch does. Where sequences end round
by round, a plan for each would take a tenth of the time or more."""

MORE_READY = 1.25
"""Ratio of the tokens that ready drafts promise, now and when the plan was made, that counts as a change."""

MORE_READY_TOKENS = 0.5
"""Least difference of the two that does."""

YOUNG_TOKENS = 40.0
"""Evidence below which a drafter's plan stands for one round: it was made of hope, and each round still
teaches a lot. One of a large batch brings more than that, and shows the most."""

YOUNG_SHARE = 0.2
"""Share of the time that planning may take meanwhile: rounds of a small policy are as short as a plan."""

YOUNG_GROWTH = 0.5
"""Growth of what was seen that is thought about for any share. What a token teaches is the less the more
were seen."""

YOUNG_COPIED_TOKENS = 12
"""Draft tokens after which that is done for a drafter that runs no model. It risks rows only, and a plan
takes a tenth of a round on a laptop: too much to pay for every token copied."""


LONGEST_PAUSE_ROUNDS = 16
"""Text to copy comes in runs. While a plan that only copies finds none, it looks again after 1, 2, 4 rounds
and so on, but no later than this: a look-up each round takes a percent of a short one."""

NOTHING_INSTEAD: Mapping[int, Assignment] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPlan:
    """A plan that may be repeated, and what it was made for."""

    plan: RoundPlan
    round_: int
    """In which it was made."""

    keys: tuple[int, ...]
    usable: tuple[str, ...]
    patience_s: float
    """Time for which it stands, unless the batch changes or more is ready for free."""

    promised: float
    """Tokens that the drafts ready for free were expected to bring."""

    copies: bool
    """Whether it uses such drafts: each round it is cut to what is ready."""

    instead: Mapping[int, Assignment]
    """How a sequence decodes that was to copy and has nothing to copy any more; plainly where it misses."""

    models: tuple[str, ...]
    """Its drafters that run a model."""

    everyone: Assignment | None
    """How all decode where one drafter that runs a model drafts for all, as long as for any of them: so may
    others decode that take their places. None for every other plan."""

    young: tuple[str, ...]
    """Its drafters of which little was known."""

    teach_tokens: int
    """Draft tokens seen of those after which it is made anew, once planning may take time again."""

    grown_tokens: int
    """Draft tokens seen of those after which it is made anew."""


class PlanKeeper:
    """Keeps one plan and tells for how long."""

    def __init__(
        self,
        acceptance: AcceptanceModel,
        *,
        runs_model: Callable[[str], bool],
        usable: Callable[[], tuple[str, ...]],
        look_due: Callable[[KeptPlan, int], bool],
        may_copy: Callable[[int], bool],
        think_budget_frac: float,
    ) -> None:
        """``look_due`` says whether a look became due between a plan's making and a round; ``may_copy`` says
        whether a plan made in a round sees what there is to copy."""
        self._acceptance, self._runs_model, self._usable = acceptance, runs_model, usable
        self._look_due, self._may_copy = look_due, may_copy
        self._patience_s = PLAN_S / think_budget_frac
        self._kept: KeptPlan | None = None
        self._since_plan_s = self._since_look_up_s = 0.0
        self._pause_rounds = self._copy_round = 0
        self._last: tuple[RoundLoad | None, tuple[int, ...]] = (None, ())
        """The load last asked about, and its sequences: rounds ask about one several times."""
        self._stood: tuple[RoundLoad, int, KeptPlan] | None = None
        """The load and round for which a plan was just found to stand: a round asks twice."""

    def keys(self, load: RoundLoad) -> tuple[int, ...]:
        """Return the sequences of a round, ascending."""
        if self._last[0] is not load:
            self._last = (load, load.keys)
        return self._last[1]

    def passed(self, seconds: float) -> None:
        """Hear that a round took so long."""
        self._since_plan_s += seconds
        self._since_look_up_s += seconds

    def copied(self, round_: int, *, anything: bool) -> None:
        """Hear whether a round in which a plan that copies looked for text found some for any sequence."""
        self._pause_rounds = 0 if anything else min(LONGEST_PAUSE_ROUNDS, max(1, 2 * self._pause_rounds))
        self._copy_round = round_ + max(1, self._pause_rounds)

    def copies_in(self, kept: KeptPlan, round_: int) -> bool:
        """Whether the plan looks for text to copy in a round."""
        return kept.copies and (round_ >= self._copy_round or bool(kept.models))

    @property
    def copies(self) -> bool:
        """Whether there is a plan that looks for text to copy."""
        return self._kept is not None and self._kept.copies

    def drop(self) -> None:
        """Plan anew next round."""
        self._kept = None

    def keep(
        self,
        plan: RoundPlan,
        load: RoundLoad,
        *,
        round_: int,
        gain: float,
        instead: Mapping[int, Assignment] = NOTHING_INSTEAD,
    ) -> None:
        """Keep a plan that was just made. ``gain`` is the best that drafting promised over plain decoding,
        ``instead`` what was best without copying."""
        used = {a.drafter for a in plan.assignments.values()}
        models = tuple(sorted(filter(self._runs_model, used)))
        young = tuple(sorted(filter(self.little_known, used)))
        whole = len(plan.assignments) == len(load.sequences) and len(used) == len(models) == 1 and not young
        seen = self._seen_tokens(young)
        teaches = 1 if any(d in models for d in young) else YOUNG_COPIED_TOKENS
        patience = 1.0 if plan.assignments else FAR_PATIENCE if gain < FAR_GAIN else PLAIN_PATIENCE
        self._kept = KeptPlan(
            plan=plan,
            round_=round_,
            keys=self.keys(load),
            usable=self._usable(),
            patience_s=self._patience_s * patience,
            promised=self._promised(load, round_),
            copies=len(models) < len(used),
            instead=instead,
            models=models,
            everyone=max(plan.assignments.values(), key=lambda a: a.gamma) if whole else None,
            young=young,
            teach_tokens=seen + teaches,
            grown_tokens=seen + max(teaches, int(YOUNG_GROWTH * seen)),
        )
        self._since_plan_s = self._since_look_up_s = 0.0
        self._pause_rounds = self._copy_round = 0

    def wants_look_up(self, load: RoundLoad, round_: int) -> bool:
        """Whether a new plan may be due in a round, or the kept one is cut to what is ready."""
        kept = self._kept
        return kept is None or self.copies_in(kept, round_) or not self._stands(kept, load, round_)

    def still_good(self, load: RoundLoad, round_: int) -> KeptPlan | None:
        """Return the plan to repeat in a round, None when one must be made."""
        kept = self._kept
        if kept is None or self._stands(kept, load, round_):
            return kept
        if self._holds(kept, load, round_) and self._promises_alike(kept, load, round_):
            self._since_look_up_s = 0.0
            return kept
        return None

    def _stands(self, kept: KeptPlan, load: RoundLoad, round_: int) -> bool:
        """Whether it is repeated whatever may be ready by now."""
        stood = self._stood
        if stood is not None and stood[0] is load and stood[1] == round_ and stood[2] is kept:
            return True
        stands = self._since_look_up_s < self._patience_s and self._holds(kept, load, round_)
        self._stood = (load, round_, kept) if stands else None
        return stands

    def _holds(self, kept: KeptPlan, load: RoundLoad, round_: int) -> bool:
        """Whether it is repeated as long as about as much is ready."""
        if self._since_plan_s < kept.patience_s:
            return self._fits(kept, load)
        return self._unchanged(kept, load, round_)

    def _fits(self, kept: KeptPlan, load: RoundLoad) -> bool:
        """Whether it is for a round like this one, and little was learnt since."""
        if kept.keys != (keys := self.keys(load)) and not self._fits_batch(kept, keys):
            return False
        if kept.usable != self._usable():
            return False
        if not kept.young:
            return True
        hurried = self._since_plan_s < PLAN_S / YOUNG_SHARE
        return self._seen_tokens(kept.young) < (kept.grown_tokens if hurried else kept.teach_tokens)

    def _fits_batch(self, kept: KeptPlan, keys: tuple[int, ...]) -> bool:
        """Whether it is for about this batch.

        What decodes plainly does so the more in a larger batch: nothing is thought over while one only fills.
        """
        planned_for, strangers = len(kept.keys), len(set(keys).difference(kept.keys))
        gone = planned_for + strangers - len(keys)
        if kept.everyone is not None:
            return abs(gone - strangers) <= BATCH_CHANGE * planned_for
        if not kept.plan.assignments and (gone == 0 or self._since_plan_s < PLAIN_STANDS * self._patience_s):
            return True
        return max(strangers, gone) <= BATCH_CHANGE * planned_for

    def _unchanged(self, kept: KeptPlan, load: RoundLoad, round_: int) -> bool:
        """Whether thinking again would hardly show anything new, all that is ready being the same."""
        return (
            self._since_plan_s < UNCHANGED_PATIENCE * kept.patience_s
            and kept.keys == self.keys(load)
            and self._fits(kept, load)
            and not self._look_due(kept, round_)
        )

    def _promises_alike(self, kept: KeptPlan, load: RoundLoad, round_: int) -> bool:
        """Whether what is ready now promises about as much as when the plan was made."""
        promised = self._promised(load, round_)
        if promised > MORE_READY * kept.promised + MORE_READY_TOKENS:
            return False
        # Less of what the plan does not use changes nothing.
        return not kept.copies or kept.promised <= MORE_READY * promised + MORE_READY_TOKENS

    def _promised(self, load: RoundLoad, round_: int) -> float:
        if not (self.copies or self._may_copy(round_)):
            return 0.0
        expected = self._acceptance.expected_accepted
        return sum([expected(d, n) for s in load.sequences for d, n in s.history_match_tokens.items() if n])

    def little_known(self, drafter: str) -> bool:
        """Whether what is known of a drafter's acceptance is little more than hope."""
        return self._acceptance.evidence_tokens(drafter) < YOUNG_TOKENS

    def _seen_tokens(self, drafters: tuple[str, ...]) -> int:
        return sum(map(self._acceptance.seen_tokens, drafters))
