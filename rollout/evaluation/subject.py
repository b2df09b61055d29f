"""What an evaluation is about: the policy, its engines, its drafters and how long each may draft."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from drafters.config import DrafterConfig
from drafters.registry import least_loops, shallow_loops
from drafters.wavefront import WAVEFRONT
from rollout.bench.arms import EngineArms
from rollout.bench.grids import open_arms, resolved_engine
from rollout.config import EngineConfig
from rollout.engine.native.build import LiveWeights, engine_of, live_weights, weights_dtype
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.errors import ConfigError
from rollout.evaluation.questions import prompts_of
from rollout.evaluation.spread import Limits, limits_of
from rollout.evaluation.ways import DraftWay, ways_of
from rollout.job_config import EvaluateConfig, JobConfig
from rollout.policy.source import Policy, load_policy

DENSE = ("w4", "history")

USUAL_DEPTHS = 3
"""Depths of ``shallow_loop`` evaluated where none are named; the deeper ones of a deep policy are by name."""

TIMED_CONTEXT_TOKENS = 128
"""Forwards are timed at contexts below this, however short the texts are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A policy under evaluation."""

    policy: Policy
    engine_config: EngineConfig
    drafter_config: DrafterConfig
    """Its names are the drafters evaluated."""

    weights: LiveWeights
    arms: EngineArms
    prompts: tuple[tuple[int, ...], ...]
    ways: tuple[DraftWay, ...]
    """Of every drafter, at the depth that is set and, in lanes, at the least as well."""

    limits: Limits

    @property
    def loops(self) -> int:
        """Of the policy."""
        return self.policy.spec.loops

    @property
    def reusing(self) -> list[DraftWay]:
        """Ways in which drafts reuse what they compute."""
        return [way for way in self.ways if least_loops(way.drafter) > 1]

    @property
    def ways_set(self) -> list[DraftWay]:
        """Those of the settings: one for each drafter."""
        return [way for way in self.ways if self.is_set(way)]

    def is_set(self, way: DraftWay) -> bool:
        """Whether the engines of ``arms`` draft this way."""
        return way.config(self.drafter_config) == self.drafter_config

    @property
    def gammas_of(self) -> Mapping[str, tuple[int, ...]]:
        """By drafter, at the depth that is set."""
        return {way.drafter: way.gammas for way in self.ways_set}

    @contextmanager
    def engine_for(self, way: DraftWay) -> Iterator[NativeEngine]:
        """Yield an idle engine that drafts this way: one of its own where the depth is not the one set."""
        if self.is_set(way):
            yield self.arms.engine
            return
        config = replace(way.config(self.drafter_config), names=(way.drafter,))
        engine = engine_of(
            self.policy,
            self.engine_config,
            config,
            version=self.arms.engine.policy_version,
            host="evaluate",
            weights=self.weights,
        )
        try:
            yield engine
        finally:
            engine.close()

    def settings(self, job: JobConfig) -> JobConfig:
        """Return the job as it was resolved, for the record."""
        return replace(job, engine=self.engine_config, drafter=self.drafter_config)


def open_subject(job: JobConfig, config: EvaluateConfig) -> Subject:
    """Load the policy and build its first engine, with every drafter. Raises ``ConfigError``.

    ``config`` names the gammas to try.
    """
    policy = load_policy(job.policy, dtype=weights_dtype(job.engine))
    names = drafters_of(policy.spec.loops, job.drafter, config)
    new_tokens = most_new_tokens(config, positions=policy.spec.max_positions)
    prompts = tuple(prompts_of(policy, new_tokens=new_tokens))
    # Forwards are timed with the rows of the longest draft behind texts of any of these lengths.
    longest = max(map(len, prompts)) + new_tokens + max(config.gammas)
    engine_config = _engine_config(job, config, policy, context_tokens=longest + PAGE_TOKENS)
    torch.set_num_threads(engine_config.threads)
    drafter_config = replace(job.drafter, names=names)
    weights = live_weights(policy, engine_config)
    arms = open_arms(policy, engine_config, drafter_config, version=job.policy.version, weights=weights)
    return Subject(
        policy=policy,
        engine_config=engine_config,
        drafter_config=drafter_config,
        weights=weights,
        arms=arms,
        prompts=prompts,
        ways=ways_of(
            names,
            config.gammas,
            config=drafter_config,
            traits=arms.engine.traits,
            loops=policy.spec.loops,
        ),
        limits=limits_of("exact" if weights.exact else "fast", engine_config.dtype),
    )


def drafters_of(loops: int, drafter: DrafterConfig, config: EvaluateConfig) -> tuple[str, ...]:
    """Return the drafters to evaluate on a policy of so many loops.

    Raises ``ConfigError`` for one that such a policy cannot have.
    """

    def can(name: str) -> bool:
        least = drafter.wavefront_depth + 1 if name == WAVEFRONT else least_loops(name)
        return loops >= least

    if len(set(config.drafters)) < len(config.drafters):
        raise ConfigError(f"evaluate.drafters must name each drafter once, got {list(config.drafters)}")
    unable = [name for name in config.drafters if not can(name)]
    if unable:
        said = f"a policy of {loops} loops" if loops > 1 else "a policy that runs its block once"
        raise ConfigError(f"evaluate.drafters: {said} has no {', '.join(unable)}")
    if config.drafters:
        return config.drafters
    if loops == 1:
        return DENSE
    return tuple(filter(can, (*shallow_loops(loops)[:USUAL_DEPTHS], WAVEFRONT)))


def most_new_tokens(config: EvaluateConfig, *, positions: int) -> int:
    """Return the new tokens of the longest text that any part asks for.

    Raises ``ConfigError`` by name for a length that leaves no position for a prompt.
    """
    asked = {
        "chain_tokens": config.chain_tokens if "chains" in config.parts else 0,
        "max_tokens": 2 * config.max_tokens if "generation" in config.parts else 0,
        "lengths": max(config.lengths) if "sweep" in config.parts else 0,
    }
    for name, tokens in asked.items():
        if tokens >= positions:
            raise ConfigError(
                f"evaluate.{name}: its longest text, of {tokens} tokens, and a prompt do not fit the "
                f"policy's {positions} positions; ask for fewer"
            )
    return max(asked.values())


def _engine_config(
    job: JobConfig, config: EvaluateConfig, policy: Policy, *, context_tokens: int
) -> EngineConfig:
    """Return settings with room for the longest prompt and text, and no more than the policy has."""
    context = min(policy.spec.max_positions, max(context_tokens, TIMED_CONTEXT_TOKENS))
    resolved = resolved_engine(job, rows=max(config.concurrencies))
    # What a round brings is told by the round: latency is looked at here.
    return replace(resolved, max_context_tokens=context, emit_s=0.0)
