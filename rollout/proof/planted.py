"""Plants every known fault in the production round and demands that a check tells it from the right one."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.proof import faults
from rollout.proof.faults import Plant
from rollout.proof.finding import Finding
from rollout.proof.tiny_checks import (
    Check,
    check_equality,
    check_looped_equality,
    check_recompute,
    check_update,
    law_check,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One wrong engine and the check that must notice."""

    name: str
    plant: Plant
    check: Check


TOKEN, BLOCK = law_check("token"), law_check("block")
TOKEN_TOP_K, BLOCK_TOP_K = law_check("token", "top_k"), law_check("block", "top_k")
BLOCK_STOPS, BLOCK_PENALTIES = law_check("block", "stops"), law_check("block", "penalties")

FAULTS: tuple[Fault, ...] = (
    Fault(name="resume from the target, token", plant=faults.resume_from_target, check=TOKEN),
    Fault(name="resume from the target, block", plant=faults.resume_from_target, check=BLOCK),
    Fault(name="bonus after a rejection, token", plant=faults.bonus_after_rejection, check=TOKEN),
    Fault(name="bonus after a rejection, block", plant=faults.bonus_after_rejection, check=BLOCK),
    Fault(
        name="bonus after a rejection, coupled",
        plant=faults.coupled_bonus_after_rejection,
        check=check_equality,
    ),
    Fault(name="trim that looks at the draft, token", plant=faults.value_dependent_trim, check=TOKEN),
    Fault(name="trim that looks at the draft, block", plant=faults.value_dependent_trim, check=BLOCK),
    Fault(name="rows reported are not those sampled", plant=faults.reported_not_sampled, check=BLOCK),
    Fault(name="filters on the drafts only, token", plant=faults.filters_on_drafts_only, check=TOKEN_TOP_K),
    Fault(name="filters on the drafts only, block", plant=faults.filters_on_drafts_only, check=BLOCK_TOP_K),
    Fault(
        name="filters on the drafts only, coupled",
        plant=faults.filters_on_drafts_only,
        check=check_equality,
    ),
    Fault(name="penalties once per block, coupled", plant=faults.penalties_per_block, check=check_equality),
    Fault(name="penalties once per block, block", plant=faults.penalties_per_block, check=BLOCK_PENALTIES),
    Fault(name="min_tokens once per block, coupled", plant=faults.min_tokens_per_block, check=check_equality),
    Fault(name="min_tokens once per block, block", plant=faults.min_tokens_per_block, check=BLOCK_STOPS),
    Fault(name="noise keyed by the round", plant=faults.noise_by_round, check=check_equality),
    Fault(name="keys one position off, coupled", plant=faults.keys_one_off, check=check_equality),
    Fault(name="keys one position off, block", plant=faults.keys_one_off, check=BLOCK),
    Fault(name="the drafter's keys kept", plant=faults.drafters_keys_kept, check=check_equality),
    Fault(name="states of another row", plant=faults.states_of_another_row, check=check_looped_equality),
    Fault(name="prompt pages of an older version", plant=faults.prefix_across_versions, check=check_update),
    Fault(name="weights of an older version", plant=faults.stale_policy, check=check_update),
    Fault(name="running keys of an older version", plant=faults.stale_keys, check=check_recompute),
    Fault(name="stops once per block, coupled", plant=faults.stops_per_block, check=check_equality),
    Fault(name="stops once per block, block", plant=faults.stops_per_block, check=BLOCK_STOPS),
)


def planted_findings() -> Iterator[Finding]:
    """Yield every check on the right engine, then every fault with what its check said of it."""
    healthy: dict[Check, Finding] = {}
    for fault in FAULTS:
        if fault.check not in healthy:
            healthy[fault.check] = timed_check(fault.check)
            yield healthy[fault.check]
        yield judge_fault(fault)


def timed_check(check: Check) -> Finding:
    """Run a check and note how long it took."""
    started_s = time.monotonic()
    found = check()
    return Finding(
        part=found.part,
        name=found.name,
        passed=found.passed,
        detail=found.detail,
        compared=found.compared,
        seconds=time.monotonic() - started_s,
        difference=found.difference,
    )


def judge_fault(fault: Fault) -> Finding:
    """Run a fault's check with the fault in; it passes when the check fails."""
    with fault.plant():
        found = timed_check(fault.check)
    by = f"{found.part}, {found.name}"
    return Finding(
        part="faults",
        name=fault.name,
        passed=not found.passed,
        detail=f"caught by {by}: {found.detail}" if not found.passed else f"NOT caught by {by}",
        compared=1,
        seconds=found.seconds,
        difference=found.difference,
        caught_by="" if found.passed else by,
    )
