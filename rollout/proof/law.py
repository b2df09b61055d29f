"""The law part: findings of the exact enumerations, many cases to a line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rollout.engine.law_check import EXACT_TV, LawCase, check_law, standard_cases
from rollout.engine.planted_laws import planted_checks
from rollout.proof.finding import Finding
from rollout.proof.round_law import RoundCase, check_round_law, round_cases

PART = "law"

Note = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class _Group:
    """Cases of one rule and gamma."""

    cases: int = 0
    branches: int = 0
    worst: float = 0.0
    failed: str = ""

    def add(self, name: str, *, tv: float, branches: int, passed: bool) -> None:
        """Count one case."""
        self.cases += 1
        self.branches += branches
        self.worst = max(self.worst, tv)
        if not passed and not self.failed:
            self.failed = f"{name} is {tv:.3g} from plain decoding"

    def finding(self, name: str) -> Finding:
        """Return what the group showed."""
        within = f"{self.cases} cases within {self.worst:.1g} of plain decoding (limit {EXACT_TV:.0e})"
        return Finding(
            part=PART,
            name=name,
            passed=not self.failed,
            detail=self.failed or f"{within}, {self.branches} branches",
            compared=self.branches,
            measures={"total_variation": self.worst},
        )


def function_findings(*, cut: bool, note: Note) -> Iterator[Finding]:
    """Enumerate the verification functions alone; the full version plants errors in them too."""
    cases = sorted((c for c in standard_cases() if not cut or c.gamma <= 2), key=_rule_and_gamma)
    for (rule, gamma), some in groupby(cases, key=_rule_and_gamma):
        name = f"{rule}, gamma {gamma}, functions alone"
        note(name)
        group = _Group()
        for case in some:
            found = check_law(case)
            group.add(f"seed {case.seed}", tv=found.tv, branches=found.branches, passed=found.passed)
        yield group.finding(name)
    if cut:
        return
    for planted in planted_checks():
        note(planted.name)
        yield Finding(
            part="faults",
            name=f"{planted.name}, {planted.rule} function alone",
            passed=planted.caught,
            detail=f"caught by law: total variation {planted.tv:.2g}" if planted.caught else "NOT caught",
            compared=1,
            caught_by="law" if planted.caught else "",
        )


def round_findings(*, cut: bool, note: Note) -> Iterator[Finding]:
    """Enumerate the production round."""
    cases = sorted(round_cases(cut=cut), key=lambda named: _rule_and_gamma(named[1]))
    for (rule, gamma), some in groupby(cases, key=lambda named: _rule_and_gamma(named[1])):
        name = f"{rule}, gamma {gamma}, production round"
        group = _Group()
        for kind, case in some:
            note(f"{name}: {kind}")
            found = check_round_law(case)
            told = f"{kind} ({found.drafted} drafts)"
            group.add(told, tv=found.tv, branches=found.branches, passed=found.passed)
        yield group.finding(name)


def _rule_and_gamma(case: LawCase | RoundCase) -> tuple[str, int]:
    return case.rule, case.gamma
