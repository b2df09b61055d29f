"""The same requests under everything that must not matter: batch, drafter, gamma, chunks, pages, threads.

The reference is plain decoding of each request alone, by the same engine. Engines are composed as they serve;
only ``numerics=exact`` and ``verify=coupled`` are set, because those are what is claimed.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controller.config import ControllerConfig
from controller.types import AR, PartShape
from drafters.config import DrafterConfig
from rollout.config import EngineConfig
from rollout.engine.native.build import engine_of
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.errors import ConfigError
from rollout.policy.source import Policy
from rollout.proof.budget import PricedArm, affordable_tokens
from rollout.proof.compare import Texts, first_difference
from rollout.proof.finding import Finding
from rollout.proof.margin import with_margin
from rollout.proof.requests import mixed_requests
from rollout.proof.steering import Drive, Steering, controlled, drive
from rollout.testing_native import ar_plan, fixed_plan, random_plan
from rollout.types import Request

PART = "equality"
CHUNK_TOKENS = 7
"""Prompt rows per round in the chunked arm: no divisor of a page, so that chunks end everywhere in one."""

CROWD = 3
"""Least sequences that share the small pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """How much is compared."""

    requests: int
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    drafters: tuple[str, ...]
    max_tokens: int
    seed: int
    within_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One run of all requests."""

    name: str
    batch: int
    steer: Callable[[NativeEngine], Steering]
    drafter: str = AR
    gamma: int = 0
    renamed: bool = False
    """Prompts under names of their own, so that ``history`` cannot look an earlier run's text up."""

    order: tuple[int, ...] = ()
    """Indices of the requests as they are submitted; empty: as they are."""

    needs: str = ""
    """A gauge that must not be 0 afterwards, or the arm has shown nothing."""


@dataclass(kw_only=True, slots=True)
class EqualityProof:
    """Runs the arms in turn. ``requests`` and ``expected`` are there once the reference has run."""

    policy: Policy
    engine_config: EngineConfig
    drafter_config: DrafterConfig
    controller: ControllerConfig
    scope: Scope
    note: Callable[[str], None] = lambda text: None
    requests: list[Request] = field(default_factory=list)
    expected: Texts = field(default_factory=dict)
    fingerprint: str = ""
    accepted: dict[str, int] = field(default_factory=dict)
    """Drafts kept, by drafter, over all its arms."""

    _main: NativeEngine | None = None
    _load_s: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scope.drafters) - set(self.drafter_config.names))
        if unknown:
            raise ConfigError(f"verify.drafters: {', '.join(unknown)} not in drafter.names")

    def findings(self) -> Iterator[Finding]:
        """Yield one finding per arm, the reference first."""
        self.note("loading the engine")
        arms = self._main_arms()
        started_s = time.monotonic()
        self._main = engine = self._engine(self._config(self.scope.max_tokens))
        self._load_s = time.monotonic() - started_s
        self.fingerprint = engine.fingerprint
        yield self._reference(engine, arms)
        for arm in arms:
            yield self._compared(engine, arm)
        yield from self._drafters_were_used()
        for config, arm in self._variants():
            self.note(f"loading the engine: {arm.name}")
            variant = self._engine(config)
            yield self._compared(variant, arm)
            variant.close()
            del variant
            gc.collect()

    def close(self) -> None:
        """Free the engine."""
        if self._main is not None:
            self._main.close()
            self._main = None
            gc.collect()

    def part_shapes(self) -> Mapping[str, PartShape]:
        """Return the cost shapes of the engine's parts. Only before ``close``."""
        assert self._main is not None, "the engine is closed"
        return self._main.part_shapes()

    def serving_config(self) -> EngineConfig:
        """Return the settings of engines that serve these requests elsewhere."""
        return self._config(self._longest_new())

    # ---- engines ----------------------------------------------------------------------------------

    def _config(self, max_tokens: int) -> EngineConfig:
        longest = max((len(r.prompt_ids) for r in self.requests), default=0)
        limit = self.policy.spec.max_positions
        context = min(limit, longest + max_tokens + PAGE_TOKENS) if longest else min(limit, 512)
        return replace(
            self.engine_config,
            numerics="exact",
            verify="coupled",
            max_batch=max(self.scope.batches),
            max_context_tokens=context,
        )

    def _engine(self, config: EngineConfig) -> NativeEngine:
        drafters = replace(self.drafter_config, names=self.scope.drafters)
        return engine_of(self.policy, config, drafters, host="verify")

    def _longest_new(self) -> int:
        return max(r.params.max_tokens or 0 for r in self.requests)

    # ---- arms -------------------------------------------------------------------------------------

    def _main_arms(self) -> list[Arm]:
        scope = self.scope
        arms = [
            Arm(name=f"plain, batch {b}", batch=b, steer=lambda _: Steering(plan=ar_plan))
            for b in scope.batches
            if b > 1
        ]
        for first, name in enumerate(scope.drafters):
            for i, gamma in enumerate(scope.gammas):
                batch = scope.batches[(first + i) % len(scope.batches)]
                arms.append(self._fixed(name, gamma, batch, renamed=i % 2 == 0))
        if scope.drafters:
            arms.append(self._random(1))
            arms.append(
                Arm(
                    name="controller on",
                    batch=max(scope.batches),
                    steer=lambda engine: controlled(engine, _bold(self.controller)),
                    drafter=scope.drafters[0],
                    gamma=2,
                )
            )
        return arms

    def _fixed(self, drafter: str, gamma: int, batch: int, *, renamed: bool = False) -> Arm:
        return Arm(
            name=f"{drafter} gamma {gamma}, batch {batch}",
            batch=batch,
            steer=lambda _: Steering(plan=fixed_plan(drafter, gamma)),
            drafter=drafter,
            gamma=gamma,
            renamed=renamed,
        )

    def _random(self, seed: int) -> Arm:
        scope = self.scope
        batch = max(scope.batches)
        if not scope.drafters:
            return Arm(name=f"plain, batch {batch}", batch=batch, steer=lambda _: Steering(plan=ar_plan))
        return Arm(
            name=f"drafter and gamma at random by sequence and round, batch {batch}",
            batch=batch,
            steer=lambda _: Steering(
                plan=random_plan(scope.drafters, max_gamma=max(scope.gammas), seed=scope.seed + seed)
            ),
            drafter=scope.drafters[0],
            gamma=max(scope.gammas) // 2,
            renamed=True,
        )

    def _variants(self) -> list[tuple[EngineConfig, Arm]]:
        """Return engines that differ in one setting, each with the arm it runs."""
        base = self._config(self._longest_new())
        threads = 2 if base.threads == 1 else 1
        variants = {
            f"prompts in chunks of {CHUNK_TOKENS}": replace(base, prefill_chunk_tokens=CHUNK_TOKENS),
            "no prompt page shared": replace(base, prefix_cache=False),
            f"kernel threads: {threads}": replace(base, threads=threads),
        }
        arms = [
            (config, replace(self._random(2 + i), name=name))
            for i, (name, config) in enumerate(variants.items())
        ]
        return [*arms, self._small_pool(base)]

    def _small_pool(self, base: EngineConfig) -> tuple[EngineConfig, Arm]:
        """Return an engine whose pool a few growing sequences fill to the last page.

        They come first, and each needs a further page before it ends: whichever is first to need one finds
        none, so somebody must be preempted.
        """
        needs = {i: self._pages_of(i) for i in range(len(self.requests))}
        growing = [i for i, (first, most) in needs.items() if most > first]
        longest = max(pages_for(len(r.prompt_ids) + (r.params.max_tokens or 0)) for r in self.requests)
        pool = crowd = 0
        while crowd < len(growing) and (crowd < CROWD or pool < longest):
            pool += needs[growing[crowd]][0]
            crowd += 1
        order = (*growing, *(i for i in needs if i not in growing))
        batch = max(base.max_batch, crowd)
        config = replace(
            base, kv_tokens=max(pool, longest) * PAGE_TOKENS, prefix_cache=False, max_batch=batch
        )
        name = f"preemption, a KV pool of {config.kv_tokens} tokens"
        return config, replace(
            self._random(9), name=name, batch=batch, order=order, needs="engine/preemptions"
        )

    def _pages_of(self, index: int) -> tuple[int, int]:
        """Return the pages a request takes on admission, and before its last token."""
        prompt = len(self.requests[index].prompt_ids)
        new = len(self.expected[self.requests[index].key].tokens)
        return pages_for(prompt + 1), pages_for(prompt + new - 1)

    # ---- running ----------------------------------------------------------------------------------

    def _reference(self, engine: NativeEngine, arms: Sequence[Arm]) -> Finding:
        scope = self.scope
        plain = PricedArm(batch=1, drafter=AR, gamma=0)
        variants = [PricedArm(batch=max(scope.batches), drafter=AR, gamma=0)] * 4
        priced = [PricedArm(batch=a.batch, drafter=a.drafter, gamma=a.gamma) for a in arms]
        tokens = affordable_tokens(
            engine,
            [plain, *priced, *variants],
            requests=scope.requests,
            within_s=scope.within_s - len(variants) * self._load_s,
            most=scope.max_tokens,
        )
        self.requests = mixed_requests(self.policy, count=scope.requests, max_tokens=tokens, seed=scope.seed)
        engine = self._right_sized(engine)
        self.note("plain, each request alone")
        run = drive(engine, self.requests, Steering(plan=ar_plan), batch=1)
        self.expected = run.completions
        committed = sum(len(c.tokens) for c in run.completions.values())
        failed = [c.error for c in run.completions.values() if c.error is not None]
        texts = len({c.token_ids for c in run.completions.values()})
        return Finding(
            part=PART,
            name="plain, each request alone: the reference",
            passed=not failed and texts > 1,
            detail=failed[0] if failed else f"{committed} tokens, {texts} different texts",
            compared=len(self.requests),
            measures={"tokens": committed, "mean_tokens": tokens},
        )

    def _right_sized(self, engine: NativeEngine) -> NativeEngine:
        """Return the engine, built again when the prompts turned out longer than it allows."""
        longest = max(len(r.prompt_ids) for r in self.requests) + self._longest_new()
        if longest + 1 <= engine.traits.max_context_tokens:
            return engine
        self.close()
        self._main = self._engine(self._config(self._longest_new()))
        return self._main

    def _compared(self, engine: NativeEngine, arm: Arm) -> Finding:
        self.note(arm.name)
        requests = self.requests
        if arm.renamed:
            requests = [replace(r, prompt_uid=f"{arm.name}/{r.prompt_uid}") for r in requests]
        sent = [requests[i] for i in arm.order] or requests
        run = drive(engine, sent, arm.steer(engine), batch=arm.batch)
        if arm.drafter != AR:
            self.accepted[arm.drafter] = self.accepted.get(arm.drafter, 0) + run.accepted
        found = {
            one.key: run.completions[other.key] for one, other in zip(self.requests, requests, strict=True)
        }
        return self.judged(arm.name, found, run, engine, needs=arm.needs)

    def judged(
        self, name: str, found: Texts, run: Drive | None, engine: NativeEngine | None, *, needs: str = ""
    ) -> Finding:
        """Compare with the reference; ``engine`` is asked for the margin of a first difference."""
        difference = first_difference(self.requests, self.expected, found)
        if difference is not None:
            request = next(
                r for r in self.requests if r.key == (difference.prompt_uid, difference.sample_index)
            )
            ids = self.expected[request.key].token_ids
            if engine is not None:
                difference = with_margin(difference, engine, request, ids)
            return Finding(
                part=PART, name=name, passed=False, detail=difference.line(), difference=difference
            )
        detail = f"{len(self.requests)} of {len(self.requests)} identical, all logprobs bit for bit"
        measures: dict[str, float] = {}
        if run is not None:
            measures = {
                "rounds": run.rounds,
                "drafted_rounds": run.drafted_rounds,
                "drafted": run.drafted,
                "accepted": run.accepted,
            }
            if run.drafted:
                detail += f", {run.accepted} of {run.drafted} drafts kept"
        happened = engine.gauges()[needs] if needs and engine is not None else 1.0
        return Finding(
            part=PART,
            name=name,
            passed=happened > 0,
            detail=detail if happened > 0 else f"{needs} is 0: nothing was put to the test",
            compared=len(self.requests),
            measures=measures,
        )

    def _drafters_were_used(self) -> Iterator[Finding]:
        for drafter in self.scope.drafters:
            kept = self.accepted.get(drafter, 0)
            yield Finding(
                part=PART,
                name=f"{drafter} was put to the test",
                passed=kept > 0,
                detail=f"{kept} of its drafts were kept",
            )


def _bold(config: ControllerConfig) -> ControllerConfig:
    """Return ``auto`` that drafts, and looks around, where the usual one would mostly decode plainly."""
    return replace(
        config,
        kind="auto",
        margin_frac=0.0,
        hysteresis_frac=0.0,
        prior_acceptance=0.95,
        explore_budget_frac=0.5,
        probe_interval_rounds=4,
    )
