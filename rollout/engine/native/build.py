"""Composition of a native engine: the one place that knows every part by its class."""

import logging
from dataclasses import dataclass

import torch

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from rollout.config import EngineConfig, PolicyConfig
from rollout.cores import usable_cores
from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, compiled_unavailable
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.kv_pool import pool_pages
from rollout.engine.native.numerics import is_row_invariant
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.fast_paths import cuda_device, refuse_off_device, with_fast_paths
from rollout.engine.target import Chooser
from rollout.errors import ConfigError
from rollout.policy.families import rope_tables
from rollout.policy.source import Policy, load_policy
from rollout.policy.spec import ModelSpec

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def build_engine(
    policy_config: PolicyConfig,
    engine_config: EngineConfig,
    drafter_config: DrafterConfig,
    *,
    host: str = "local",
) -> NativeEngine:
    """Load the policy and return an engine that serves it. Logs every choice that ``auto`` left open."""
    policy = load_policy(policy_config, dtype=weights_dtype(engine_config))
    return engine_of(policy, engine_config, drafter_config, version=policy_config.version, host=host)


def weights_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype a policy is loaded in for ``engine_of``."""
    return _DTYPES[config.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWeights:
    """A policy's weights as an engine reads them."""

    decoder: Decoder
    description: str
    """What computes, for the log and the fingerprint."""

    exact: bool
    """Whether a row's bits do not depend on the rows beside it."""


def live_weights(policy: Policy, config: EngineConfig) -> LiveWeights:
    """Pack a policy's weights and check their numerics, and on CUDA its fast paths.

    Raises ``ConfigError`` first where the settings do not fit the device, or the policy its KV pool.
    """
    refuse_off_device(config)
    pool_pages(config, policy.spec)
    threads = config.threads or len(usable_cores())
    rope = rope_tables(policy.config, min(policy.spec.max_positions, config.max_context_tokens + 1))
    decoder, description = _decoder(policy.spec, rope.cos_PH, rope.sin_PH, config, threads)
    decoder.load(policy.state)
    if isinstance(decoder, TorchDecoder) and decoder.device.type == "cuda":
        decoder, fast_paths = with_fast_paths(decoder, config, cuda_device(decoder.device))
        description = f"{description} {fast_paths}".rstrip()
    return LiveWeights(decoder=decoder, description=description, exact=_numerics(decoder, config))


def engine_of(
    policy: Policy,
    engine_config: EngineConfig,
    drafter_config: DrafterConfig,
    *,
    version: int = 0,
    host: str = "local",
    weights: LiveWeights | None = None,
) -> NativeEngine:
    """Return an engine that serves a loaded policy.

    Engines that take turns on one thread may share ``weights``: an update of one would be an update of all.
    """
    threads = engine_config.threads or len(usable_cores())
    weights = weights or live_weights(policy, engine_config)
    decoder = weights.decoder
    chooser: Chooser = CompiledChooser(threads=threads) if decoder.compiled else TorchChooser()
    drafting = Drafting(
        [build_drafter(name, drafter_config) for name in drafter_config.names],
        vocab_size=policy.spec.vocab_size,
        failure_limit=drafter_config.failure_limit,
    )
    numerics = "exact" if weights.exact else "fast"
    log.info("engine: %s, %d threads, numerics %s", weights.description, threads, numerics)
    return NativeEngine(
        decoder=decoder,
        chooser=chooser,
        drafting=drafting,
        config=engine_config,
        numerics_exact=weights.exact,
        decoder_description=weights.description,
        detokenizer=policy.tokenizer,
        policy_version=version,
        weights_checksum=policy.checksum,
        host=host,
    )


def _decoder(
    spec: ModelSpec, cos_PH: torch.Tensor, sin_PH: torch.Tensor, config: EngineConfig, threads: int
) -> tuple[Decoder, str]:
    unavailable = compiled_unavailable() if config.decoder != "torch" else "engine.decoder=torch"
    fits = config.device == "cpu" and config.dtype == "bfloat16"
    if config.decoder == "compiled" and (unavailable or not fits):
        raise ConfigError(
            "engine.decoder=compiled needs device=cpu, dtype=bfloat16 and a C++ compiler, got "
            f"{config.device}, {config.dtype}: {unavailable or 'compiler found'}"
        )
    if fits and unavailable is None:
        compiled = CompiledDecoder(spec, cos_PH=cos_PH, sin_PH=sin_PH, threads=threads)
        return compiled, compiled.description()
    if config.decoder == "auto":
        log.warning("engine.decoder: auto -> torch (%s)", unavailable or f"{config.device}, {config.dtype}")
    device = _usable_device(config)
    torch.set_num_threads(threads)
    decoder = TorchDecoder(
        spec,
        cos_PH=cos_PH,
        sin_PH=sin_PH,
        dtype=weights_dtype(config),
        device=device,
        exact=_row_by_row(config),
    )
    hardware = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return decoder, f"torch {config.device} {config.dtype} threads={threads} {hardware}"


def _usable_device(config: EngineConfig) -> torch.device:
    """Return ``engine.device``. Raises ``ConfigError`` for one that is none, or is not here."""
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"engine.device={config.device!r} is no device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device={config.device}: this torch sees no CUDA device")
    return device


def _row_by_row(config: EngineConfig) -> bool:
    """Whether the torch decoder computes every row alone: what ``exact`` needs, and on an accelerator far too
    slow to be anybody's default."""
    if config.numerics == "auto":
        return config.device == "cpu"
    return config.numerics == "exact"


def _numerics(decoder: Decoder, config: EngineConfig) -> bool:
    if config.numerics == "fast":
        return False
    # A decoder that promises no bits may pass by luck.
    passed = decoder.row_invariant and is_row_invariant(decoder)
    if config.numerics == "exact" and not passed:
        raise ConfigError("engine.numerics=exact: the self-check found rows that change with their batch")
    if config.numerics == "auto":
        log.info("engine.numerics: auto -> %s", "exact" if passed else "fast")
    return passed
