"""The policies a benchmark runs on: as it is, and moved off its 4-bit grid."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from controller.calibration import Calibration
from controller.types import AR
from drafters.config import DrafterConfig
from rollout.bench.arms import EngineArms
from rollout.bench.cell import HF
from rollout.bench.vllm_arm import SPECULATIVE
from rollout.calibration.store import load_or_calibrate
from rollout.config import EngineConfig
from rollout.cores import usable_cores
from rollout.engine.native.build import LiveWeights, engine_of, live_weights
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.perplexity import SAMPLE_TEXT, PerplexityChange, perplexity_change
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.policy.families import rope_tables
from rollout.policy.source import Policy, load_policy

log = logging.getLogger(__name__)

AUTO = "auto"
HISTORY = "history"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """One policy and the arms on it."""

    grid: Literal["on", "off"]
    policy: Policy
    arms: EngineArms
    calibration: Calibration | None
    """What ``auto`` starts with; None where it does not run."""

    @property
    def prefix(self) -> str:
        """What it adds to the names of results."""
        return "offgrid_" if self.grid == "off" else ""


def resolved_engine(job: JobConfig, *, rows: int) -> EngineConfig:
    """Return the engine's settings, threads explicit. Raises ``ConfigError`` for what cannot be compared."""
    config = job.engine
    if config.verify != "coupled":
        raise ConfigError(
            f"engine.verify={config.verify} gives other texts by drafter: arms are compared on one text"
        )
    if config.max_batch < rows:
        raise ConfigError(f"engine.max_batch must be >= {rows}, the rows that run at once")
    # Without the prefix cache every run computes its prompts, as the foreign arm does.
    return replace(config, threads=config.threads or len(usable_cores()), prefix_cache=False)


def chosen_arms(job: JobConfig) -> tuple[str, ...]:
    """Return the arms to run, ``ar`` first. Raises ``ConfigError`` for a name that is none."""
    workload = job.bench.workload
    known = _known_arms(workload, job.drafter.names)
    unknown = [name for name in job.bench.arms if name not in known]
    if unknown:
        raise ConfigError(
            f"bench.arms: no arm {', '.join(unknown)} in workload {workload}; there are: {', '.join(known)}"
        )
    # Free drafts at a fixed length are no claim of ``fixed``: left out unless asked for.
    default = [name for name in known if not (workload == "fixed" and name == HISTORY)]
    return tuple(name for name in known if name in (job.bench.arms or default))


def _known_arms(workload: str, drafters: Sequence[str]) -> tuple[str, ...]:
    if workload == "peers":
        return (AR, HF, *SPECULATIVE)
    if workload == "steps":
        return (AR, *(name for name in drafters if name != HISTORY))
    return (AR, *drafters, AUTO, *((HF,) if workload == "drain" else ()))


def load_grid(job: JobConfig, engine_config: EngineConfig, grid: Literal["on", "off"]) -> Policy:
    """Return the policy's weights as they are, or moved off their grid."""
    dtype = getattr(torch, engine_config.dtype)
    return load_policy(replace(job.policy, offgrid=grid == "off"), dtype=dtype)


def open_grid(job: JobConfig, engine_config: EngineConfig, grid: Literal["on", "off"]) -> Grid:
    """Load the policy, build its engine with every drafter, and calibrate it where ``auto`` runs.

    Raises ``ConfigError``.
    """
    policy = load_grid(job, engine_config, grid)
    arms = open_arms(policy, engine_config, job.drafter, version=job.policy.version)
    if arms.engine.traits.numerics != "exact":
        raise ConfigError("engine.numerics: bench asserts identical texts, and this engine is not exact here")
    if AUTO in chosen_arms(job):
        arms.calibration = load_or_calibrate(arms.engine, job.controller, engine_config)
    return Grid(grid=grid, policy=policy, arms=arms, calibration=arms.calibration)


def open_arms(
    policy: Policy,
    engine_config: EngineConfig,
    drafter_config: DrafterConfig,
    *,
    version: int = 0,
    weights: LiveWeights | None = None,
) -> EngineArms:
    """Return arms on one policy whose engines share its weights; each has every drafter that is named.

    Raises ``ConfigError`` for a drafter that cannot be built from the policy.
    """
    shared = weights or live_weights(policy, engine_config)

    def lane() -> NativeEngine:
        return engine_of(policy, engine_config, drafter_config, version=version, host="bench", weights=shared)

    engine = lane()
    wanted = {d.name for d in engine.traits.drafters}
    missing = [name for name in drafter_config.names if name not in wanted]
    if missing:
        raise ConfigError(f"drafter.names: {', '.join(missing)} could not be built from this policy")
    return EngineArms(engine, None, another=lane)


def offgrid_change(on: Policy, off: Policy) -> PerplexityChange | None:
    """Return what leaving the grid did to the policy's perplexity on a short text; None without tokenizer."""
    if on.tokenizer is None:
        return None
    tokens = list(on.tokenizer(SAMPLE_TEXT)["input_ids"])[: on.spec.max_positions]
    rope = rope_tables(on.config, len(tokens))
    decoder = TorchDecoder(
        on.spec, cos_PH=rope.cos_PH, sin_PH=rope.sin_PH, dtype=torch.float32, device="cpu", exact=False
    )
    return perplexity_change(decoder, before=on.state, after=off.state, texts=[tokens])
