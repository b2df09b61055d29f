"""Known-wrong engines are told from the right one. Each test plants one mistake in the production round."""

import pytest
import torch

from rollout.engine import noise
from rollout.engine.native import committer, engine, judging, pages
from rollout.engine.native.drafts import view
from rollout.engine.native.drafts.draft_states import DraftStates
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.sequence import LiveSequence
from rollout.proof.finding import Finding
from rollout.proof.noise_law import noise_findings, poisson_two_sided, poisson_upper
from rollout.proof.orderings import ordering_findings
from rollout.proof.planted import FAULTS, Fault, judge_fault
from rollout.proof.round_law import CASES, RoundCase, check_round_law, round_cases
from rollout.proof.tiny_checks import Check

pytestmark = pytest.mark.lossless

CHECKS = list(dict.fromkeys(fault.check for fault in FAULTS))


@pytest.mark.parametrize("check", CHECKS, ids=[str(i) for i in range(len(CHECKS))])
def test_the_right_engine_passes_every_check(check: Check) -> None:
    found = check()
    assert found.passed, found.detail
    assert found.compared > 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    found = judge_fault(fault)
    assert found.passed, found.detail
    assert found.caught_by


def test_every_known_wrong_verifier_is_among_the_faults() -> None:
    names = " / ".join(fault.name for fault in FAULTS)
    for wanted in (
        "resume from the target",
        "bonus after a rejection",
        "trim that looks at the draft",
        "filters on the drafts only",
        "keys one position off",
        "prompt pages of an older version",
        "weights of an older version",
        "noise keyed by the round",
        "stops once per block",
    ):
        assert wanted in names


def test_a_fault_leaves_nothing_behind() -> None:
    pieces = [
        (judging, "verify_token"),
        (judging, "verify_block"),
        (judging, "verify_coupled"),
        (judging, "noise_seed"),
        (view, "noise_seed"),
        (judging.Judge, "_spans"),
        (Drafting, "propose"),
        (LiveSequence, "target_row"),
        (engine, "row_batch"),
        (engine.NativeEngine, "_verdicts"),
        (engine.NativeEngine, "commit_update"),
        (engine.NativeEngine, "settle_running"),
        (DraftStates, "standing"),
        (pages, "_chain"),
        (pages.PrefixIndex, "clear"),
        (committer.Committer, "_commit_tokens"),
    ]
    before = [getattr(owner, name) for owner, name in pieces]
    touched: set[int] = set()
    for fault in FAULTS:
        with fault.plant():
            touched |= {i for i, (o, n) in enumerate(pieces) if getattr(o, n) is not before[i]}
        assert [getattr(owner, name) for owner, name in pieces] == before
    assert touched == set(range(len(pieces)))


# ---- the law of the production round --------------------------------------------------------------

CUT = list(round_cases(cut=True))


@pytest.mark.parametrize(("name", "case"), CUT, ids=[f"{c.rule}, {n}" for n, c in CUT])
def test_the_production_round_emits_the_law_of_plain_decoding(name: str, case: RoundCase) -> None:
    """A5: for drafts of known rows, certain drafts, the policy's 4-bit copy, and its first loop."""
    found = check_round_law(case)
    assert found.tv <= 1e-12
    assert found.passed


def test_the_full_suite_covers_both_rules_every_gamma_and_every_kind_of_params() -> None:
    covered = {(c.rule, c.gamma, name.split(",")[0]) for name, c in round_cases()}
    assert covered >= {(r, g, k) for r in ("token", "block") for g in (1, 2, 3, 4) for k in CASES}


# ---- coupled --------------------------------------------------------------------------------------


def test_planted_drafts_keep_exactly_what_is_right_and_change_nothing() -> None:
    found = list(ordering_findings())
    assert not [f.line() for f in found if not f.passed]
    assert len(found) >= 12


def test_the_noise_passes() -> None:
    assert not [f.line() for f in noise_findings() if not f.passed]


def failed(found: list[Finding]) -> set[str]:
    return {f.name.removeprefix("noise, ") for f in found if not f.passed}


def test_noise_that_repeats_over_positions_is_rejected() -> None:
    assert "independent, neighbouring positions" in failed(
        noise_findings(key_of=lambda seed, position: noise.noise_key(seed, position // 2))
    )


def test_noise_that_adds_seed_and_position_is_rejected() -> None:
    assert "independent, seed up, position down" in failed(
        noise_findings(key_of=lambda seed, position: noise.noise_key(0, seed + position))
    )


def test_noise_that_steps_by_token_is_rejected() -> None:
    """The key's hash plus a Weyl step per token: uniform, and each token follows from its neighbour."""
    wrong = failed(
        noise_findings(
            hash_of=lambda keys, tokens: (
                (torch.tensor([k & 0xFFFFFFFF for k in keys]).unsqueeze(1) + tokens * noise.GOLDEN_32)
                & 0xFFFFFFFF
            )
        )
    )
    assert "independent, neighbouring tokens" in wrong


def test_noise_without_its_extremes_is_rejected() -> None:
    """Sixteen bits of hash look uniform in any histogram; the largest noise never comes."""
    wrong = failed(
        noise_findings(hash_of=lambda keys, tokens: (noise.hash32(keys, tokens) & ~0xFFFF) + 0x8000)
    )
    assert wrong == {"extreme tail 2^-18"}


def test_noise_with_a_favourite_token_in_its_tail_is_rejected() -> None:
    def favour(keys: list[int], tokens: torch.Tensor) -> torch.Tensor:
        hashes = noise.hash32(keys, tokens)
        hashes[::6, 17] = 0
        return hashes

    assert "extreme tail 2^-14" in failed(noise_findings(hash_of=favour))  # type: ignore[arg-type]


def test_poisson_tails_are_those_of_the_definition() -> None:
    assert poisson_upper(1, 2.0) == pytest.approx(1 - 2.718281828459045**-2)
    assert poisson_upper(0, 2.0) == 1.0
    assert poisson_two_sided(0, 40.0) < 1e-16
    assert poisson_two_sided(40, 40.0) > 0.9
