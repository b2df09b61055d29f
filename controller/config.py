"""Settings of the controller. Imports nothing heavy; every wrong value is refused by its full path."""

import math
from dataclasses import dataclass, fields
from typing import Literal

ControllerKind = Literal["auto", "ar", "fixed", "threshold", "ladder"]
KINDS: tuple[ControllerKind, ...] = ("auto", "ar", "fixed", "threshold", "ladder")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """Who decides, and how sure it must be before it changes anything."""

    kind: ControllerKind = "auto"
    """``auto`` decides from cost and acceptance; the others are baselines to compare it with."""

    drafter: str = "w4"
    """Drafter of ``fixed``, ``threshold`` and ``ladder``; ``auto`` chooses among all the engine has."""

    gamma: int = 4
    """Draft tokens of ``fixed`` and ``threshold``. 4 is near the flat optimum of a drafter that costs a
    third of the policy and is accepted nine times in ten."""

    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    """Longest drafts ``auto`` may plan for a round, ascending; one sequence may get fewer, and none more than
    its drafter's ``max_gamma``: lengths beyond that cost no thought. The compiled forward leaves its free
    rows at about 12; drafters that are nearly the policy, as all its loops but one are, still gain by 16."""

    threshold_batch: int = 8
    """``threshold`` and ``ladder`` speculate from the first round with at most this many sequences."""

    ladder_gammas: tuple[int, ...] = (5, 7, 9, 11)
    """The published ladder's draft lengths, ascending; it starts at the first."""

    ladder_raise_frac: float = 0.94
    """Published: a rollout that accepted at least this share of its draft tokens votes to raise gamma."""

    ladder_lower_frac: float = 0.85
    """Published: one that accepted at most this share votes to lower it."""

    ladder_patience_rollouts: int = 2
    """Published: equal votes in a row before gamma moves."""

    margin_frac: float = 0.05
    """Predicted gain over plain decoding that switches speculation on. Above the model's usual error of
    the ratio, and no larger than the share of the best speed we are willing to leave unused."""

    hysteresis_frac: float = 0.02
    """How far the predicted gain may fall below ``margin_frac`` before speculation goes off again."""

    tail_weight: float = 0.25
    """0 counts every token alike; 1 counts a token of a sequence in proportion to its expected remaining
    work once nothing waits, because the last sequence ends the rollout. A quarter keeps the loss of
    tokens per second within the margin."""

    probe_interval_rounds: int = 64
    """Rounds without an observation of a drafter before one sequence tries it. Acceptance cannot be seen
    while a drafter is unused, so without probes it could never be seen to improve."""

    probe_gamma: int = 1
    """Draft tokens of a probe. One shows whether drafts are kept and what a pass costs, for less than half of
    what two cost; positions not seen lean on it."""

    check_interval_rounds: int = 32
    """Speculative rounds before one plain round measures what plain decoding costs at this batch. It
    loses little where the gain is small, which is where it matters; elsewhere the budget spaces it out."""

    explore_budget_frac: float = 0.0035
    """Largest share of time that probes and checks may lose: a sixth of the 2% ``auto`` may cost where
    speculation never pays. Short rounds at small batch need most of the rest for deciding."""

    think_budget_frac: float = 0.005
    """Share of time that planning may take; in between, the last plan is repeated. Rounds of 5 ms are
    too short to be planned one by one."""

    prior_acceptance: float = 0.8
    """Acceptance per draft token assumed before any was seen. Hopeful on purpose: a wrong hope costs a
    few rounds, a wrong fear costs until the next probes."""

    prior_acceptance_copied: float = 0.5
    """The same for a drafter that runs no model. Text to copy is found often and seldom goes on as it did, so
    more hope than this cost percents at four sequences; and its first drafts come early anyway."""

    prior_tokens: float = 8.0
    """Draft tokens the prior is worth: two rounds of evidence outweigh it."""

    hope_errors: float = 1.5
    """Standard errors by which scarce evidence is read in favour of a drafter that runs a model; none are
    left once the memory is full, and ``wavefront``, whose lanes have to fill first, starts without. Copies
    are tried for little by probes, and while one sequence gains by them the others wait: no hope for them."""

    position_prior_tokens: float = 16.0
    """Draft tokens by which a position's acceptance leans on the drafter's mean over positions."""

    sequence_prior_tokens: float = 24.0
    """Draft tokens by which a sequence's acceptance leans on the drafter's."""

    acceptance_window_tokens: float = 1024.0
    """Draft tokens after which an observation has lost 63% of its weight: a standard error of about one
    point, and a few seconds of speculation."""

    version_discount: float = 0.5
    """Share of the acceptance evidence kept when the policy version moves. Drafters are rebuilt from the
    new policy, so most of what was learnt still holds."""

    change_z: float = 3.0
    """While a drafter is only probed: standard errors between recent and remembered acceptance at which
    the memory is replaced by the recent evidence. At few tokens per probe, forgetting is too slow."""

    cost_quantile: float = 0.35
    """Quantile of measured over predicted time that corrects the cost model. Below the middle, because
    stalls only ever make a round longer."""

    cost_window_rounds: int = 24
    """Observations kept per machine parameter: a change of memory speed is followed within a third of a
    second of 15 ms rounds, and single stalls leave no mark."""

    switch_horizon_rounds: int = 32
    """Rounds over which the price of catching a drafter up with a sequence is spread."""

    watchdog_collapse_frac: float = 0.5
    """A drafter whose acceptance is surely below this share of its own history is broken, not unlucky."""

    watchdog_failures: int = 3
    """Rounds in a row in which a drafter failed before it is rebuilt, and again before it goes off."""

    watchdog_version_lag: int = 1
    """Most policy versions a drafter may lie behind. Rebuilt ones lag 0; a head in training may lag 1."""

    watchdog_cooldown_s: float = 60.0
    """How long a rebuilt drafter is on probation, and one that was switched off stays off."""

    def __post_init__(self) -> None:
        for name in ("gammas", "ladder_gammas"):
            # YAML delivers lists; the record itself stays hashable.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        problems = [message for bad, message in self._checks() if bad]
        if problems:
            raise ValueError("; ".join(problems))

    def _check_numbers(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("kind", "drafter", "gammas", "ladder_gammas"):
                continue
            wrong = isinstance(value, bool) or not isinstance(value, int | float)
            if wrong or not math.isfinite(value) or (f.type in (int, "int") and not isinstance(value, int)):
                kind = "an integer" if f.type in (int, "int") else "a finite number"
                raise ValueError(f"controller.{f.name} must be {kind}, got {value!r}")

    def _checks(self) -> list[tuple[bool, str]]:
        def bad_ladder(values: tuple[int, ...]) -> bool:
            whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
            return not whole or not values or values[0] < 1 or list(values) != sorted(set(values))

        checks = [
            (self.kind not in KINDS, f"controller.kind must be one of {', '.join(KINDS)}, got {self.kind!r}"),
            (
                not isinstance(self.drafter, str) or not self.drafter or self.drafter == "ar",
                f"controller.drafter must name a drafter, got {self.drafter!r}",
            ),
            (bad_ladder(self.gammas), f"controller.gammas must ascend from >= 1, got {self.gammas}"),
            (
                bad_ladder(self.ladder_gammas),
                f"controller.ladder_gammas must ascend from >= 1, got {self.ladder_gammas}",
            ),
            (
                not 0 < self.ladder_lower_frac < self.ladder_raise_frac <= 1,
                "controller.ladder_lower_frac must lie below controller.ladder_raise_frac, both in (0, 1], "
                f"got {self.ladder_lower_frac} and {self.ladder_raise_frac}",
            ),
            (
                self.hysteresis_frac > self.margin_frac,
                "controller.hysteresis_frac must not exceed controller.margin_frac, or a predicted loss "
                f"would hold speculation on, got {self.hysteresis_frac} and {self.margin_frac}",
            ),
        ]
        at_least_one = [
            *("gamma", "threshold_batch", "ladder_patience_rollouts", "probe_interval_rounds", "probe_gamma"),
            *("check_interval_rounds", "cost_window_rounds", "watchdog_failures", "switch_horizon_rounds"),
            *("acceptance_window_tokens", "position_prior_tokens", "sequence_prior_tokens", "prior_tokens"),
        ]
        at_least_zero = ["margin_frac", "hysteresis_frac", "change_z", "watchdog_version_lag", "hope_errors"]
        at_least_zero += ["watchdog_cooldown_s"]
        shares = ["tail_weight", "version_discount", "watchdog_collapse_frac", "explore_budget_frac"]
        open_shares = ["prior_acceptance", "prior_acceptance_copied", "cost_quantile", "think_budget_frac"]
        for names, low, high, words in (
            (at_least_one, 1, math.inf, ">= 1"),
            (at_least_zero, 0, math.inf, ">= 0"),
            (shares, 0, 1, "in [0, 1]"),
            (open_shares, 1e-6, 1 - 1e-6, "in (0, 1)"),
        ):
            for name in names:
                value = getattr(self, name)
                checks.append((not low <= value <= high, f"controller.{name} must be {words}, got {value}"))
        return checks
