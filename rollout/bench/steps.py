"""Workload ``steps``: what one round costs, by batch, context and rows, beside the least it could cost.

Which cells there are, and what is claimed of them. Claims stand at the shortest context of their batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from controller.types import POLICY
from rollout.bench.arms import Work
from rollout.bench.choosing import REAL_ROWS, WAYS, ChoosingClock, logits_of
from rollout.bench.cost_ratio import CostClaim, CostRatio
from rollout.bench.fixed import W4
from rollout.bench.grids import Grid, resolved_engine
from rollout.bench.machine import MemorySpeed, free_memory_bytes
from rollout.bench.prompts import long_prompts, prompt_ids
from rollout.bench.step_cell import DRAFT, PLAIN, Kind, StepCell, Visit, visit_tokens
from rollout.config import EngineConfig
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.errors import ConfigError
from rollout.job_config import BenchConfig, JobConfig

AR_OVER_BYTES_BOUND = 1.25
DRAFT_OVER_AR = {1: 0.42, 4: 0.5}
"""By batch, of ``w4``."""

VERIFY_GAMMA = 5
VERIFY_OVER_AR = 1.2
"""Of a sequence alone that verifies this many drafts, so one row more."""

CHOICE_SHARE = 0.07
"""Of a plain round, at every batch, however it samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A batch and context that was asked for and is not measured."""

    batch: int
    context_tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A ratio, and what a visit says of it."""

    claim: CostClaim
    value: Callable[[Visit], float]


MEMORY_SHARE = 0.6
"""Of the memory that is free: what keys and values may take."""


def steps_engine(job: JobConfig) -> EngineConfig:
    """Return the engine's settings: as large as the cells want, or the memory that is free allows.

    Prompts' pages are kept between visits.
    """
    bench = job.bench
    batch = max(bench.batches_run)
    roomy = replace(job.engine, max_batch=max(job.engine.max_batch, batch))
    return replace(
        resolved_engine(replace(job, engine=roomy), rows=batch),
        max_context_tokens=max(bench.contexts) + visit_tokens(bench.step_gammas),
        kv_bytes=max(job.engine.kv_bytes, int(MEMORY_SHARE * free_memory_bytes())),
        prefix_cache=True,
    )


def plan_cells(
    bench: BenchConfig, *, context_limit: int, kv_tokens: int
) -> tuple[list[tuple[int, int]], list[LeftOut]]:
    """Return (batch, context) of every cell, short contexts first, and what is left out. Pure.

    ``context_limit`` is what the policy and engine allow a sequence, ``kv_tokens`` what the engine's memory
    holds. Raises ``ConfigError`` when nothing is left.
    """
    room = visit_tokens(bench.step_gammas)
    cells, left_out = [], []
    for context in sorted(bench.contexts):
        for batch in sorted(bench.batches_run):
            reason = ""
            if context + room > context_limit:
                reason = f"{context} tokens and the {room} of a visit exceed the context of {context_limit}"
            elif batch * (context + room) > kv_tokens:
                tokens = batch * (context + room)
                reason = f"{tokens} tokens over the batch exceed the {kv_tokens} that fit in memory"
            if reason:
                left_out.append(LeftOut(batch=batch, context_tokens=context, reason=reason))
            else:
                cells.append((batch, context))
    if not cells:
        raise ConfigError(f"bench.batches and bench.contexts: nothing can be measured: {left_out[0].reason}")
    return cells, left_out


def claims_of(batch: int, gammas: Sequence[int]) -> list[Measured]:
    """Return what is claimed of a batch at its shortest context. Pure."""
    claims = [
        Measured(
            claim=CostClaim(name=f"token_choice_share_b{batch}", at_most=CHOICE_SHARE),
            value=lambda visit: visit.choosing_s[PLAIN] / visit.cost_s(PLAIN),
        ),
        *(
            Measured(
                claim=CostClaim(name=f"token_choice_{way}_share_b{batch}", at_most=CHOICE_SHARE),
                value=partial(Visit.choosing_share, way=way),
            )
            for way in WAYS
        ),
    ]
    if batch == 1:
        claims.append(
            Measured(
                claim=CostClaim(name="ar_b1_over_bytes_bound", at_most=AR_OVER_BYTES_BOUND),
                value=lambda visit: visit.cost_s(PLAIN) / visit.bounds[PLAIN].bytes_s,
            )
        )
    if batch in DRAFT_OVER_AR and gammas:
        claims.append(
            Measured(
                claim=CostClaim(name=f"{W4}_draft_b{batch}_over_ar", at_most=DRAFT_OVER_AR[batch]),
                value=lambda visit: visit.cost_s(DRAFT) / visit.cost_s(PLAIN),
            )
        )
    if batch == 1 and VERIFY_GAMMA in gammas:
        verify = Kind(name="verify", gamma=VERIFY_GAMMA)
        claims.append(
            Measured(
                claim=CostClaim(name=f"verify{VERIFY_GAMMA + 1}_b1_over_ar", at_most=VERIFY_OVER_AR),
                value=lambda visit: visit.cost_s(verify) / visit.cost_s(PLAIN),
            )
        )
    return claims


def steps_cells(
    job: JobConfig,
    grid: Grid,
    arms: Sequence[str],
    *,
    memory: MemorySpeed,
    rate_of: Callable[[str], float],
) -> tuple[list[StepCell], list[LeftOut]]:
    """Return every cell and what is left out. The engine must be idle: its policy is asked for logits."""
    bench, engine = job.bench, grid.arms.engine
    drafter = W4 if W4 in arms else None
    engine.use_drafters([] if drafter is None else [drafter])
    kv_tokens = int(engine.gauges()["engine/kv_pages_total"]) * PAGE_TOKENS
    spots, left_out = plan_cells(bench, context_limit=engine.traits.max_context_tokens, kv_tokens=kv_tokens)
    rows = max(bench.max_verify_rows, *(batch for batch, _ in spots))
    logits_RV = logits_of(engine, prompt_ids(grid.policy.tokenizer, REAL_ROWS), rows=rows)
    clock = ChoosingClock(engine.chooser, logits_RV, temperature=bench.temperature)
    tokenizer, vocab = grid.policy.tokenizer, grid.policy.spec.vocab_size
    room = visit_tokens(bench.step_gammas)
    cells, seen = [], set()
    for batch, context in spots:
        gammas = gammas_of(bench, batch, context) if drafter is not None else ()
        claims = claims_of(batch, gammas) if batch not in seen else []
        seen.add(batch)
        cells.append(
            StepCell(
                batch=batch,
                context_tokens=context,
                engine=engine,
                work=Work(
                    # One more than whole pages, all of them known: a sequence starts with a single row.
                    prompts=tuple(long_prompts(tokenizer, batch, context + 1, vocab_size=vocab)),
                    max_tokens=(room,) * batch,
                    ignore_eos=True,
                    temperature=bench.temperature,
                    run_seed=job.seed,
                ),
                gammas=gammas,
                drafter=drafter,
                choosing=clock,
                memory=memory,
                rate_of=rate_of,
                ratios=[
                    CostRatio(claim=m.claim, min_values=bench.min_pairs, max_values=bench.max_pairs)
                    for m in claims
                ],
                value_of={m.claim.name: m.value for m in claims},
                min_visits=bench.min_pairs,
            )
        )
    return cells, left_out


def gammas_of(bench: BenchConfig, batch: int, context: int) -> tuple[int, ...]:
    """Return the drafts per sequence that a cell verifies; none where its context is too long. Pure."""
    if batch * context > bench.max_draft_tokens:
        return ()
    return tuple(g for g in sorted(bench.step_gammas) if batch * (g + 1) <= bench.max_verify_rows)


def told_ahead(cells: Sequence[StepCell], left_out: Sequence[LeftOut], bench: BenchConfig) -> str:
    """Return what will be measured and about how long the visits that every cell gets will take."""
    seconds = sum(cell.min_visits * cell.least_visit_s for cell in cells)
    most = f"at most {bench.max_minutes:g} min" if bench.max_minutes else "without a limit"
    skipped = f", {len(left_out)} left out" if left_out else ""
    return (
        f"steps: {len(cells)} batches and contexts{skipped}; {bench.min_pairs} visits of each take about "
        f"{max(1, round(seconds / 60))} min; claims that are open get more, {most} in all"
    )


def parts_timed(arms: Sequence[str]) -> tuple[str, ...]:
    """Return the model parts whose kernels' rate is measured."""
    return (POLICY, W4) if W4 in arms else (POLICY,)
