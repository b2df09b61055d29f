"""Settings of the rollout side. Defaults live here; YAML only picks and overrides."""

from dataclasses import dataclass
from typing import Literal

from rollout.errors import ConfigError
from rollout.ranges import check_settings

SMALLEST_STORE_BYTES = 75 << 20
"""Ray starts with no smaller object store."""

KV_BYTES_LEAST = 1 << 20
"""No policy worth serving keeps a sequence in less than a megabyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Which policy, and where its folder is."""

    source: str = "smollm2"
    """``smollm2`` (embedded), ``looped`` (in a checkout), a local Hugging Face folder, or a hub id."""

    offgrid: bool = False
    """Move every weight of a linear by seeded uniform noise of a quarter of its 4-bit step. The embedded
    weights lie on a 4-bit grid, which flatters a 4-bit drafter; trained weights do not."""

    offgrid_seed: int = 0
    version: int = 0
    """Version of the weights as loaded."""

    def __post_init__(self) -> None:
        check_settings("policy", self)
        if not isinstance(self.source, str) or not self.source:
            raise ConfigError(f"policy.source must name a policy, got {self.source!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the policy runs."""

    decoder: Literal["auto", "compiled", "torch"] = "auto"
    device: str = "cpu"
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Of the weights. The compiled decoder keeps bfloat16 weights and computes in float32; the torch
    decoder computes in this dtype."""

    numerics: Literal["auto", "exact", "fast"] = "auto"
    """``auto``: exact where the start-up self-check passes, and fast on an accelerator, where rows would have
    to be computed one by one. ``exact`` refuses to start where the check does not pass."""

    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """Of the torch decoder in ``fast`` numerics on CUDA: torch's SDPA, or flash-attn (the extra ``flash``;
    bfloat16). ``auto``: flash-attn where it is installed and agrees with SDPA on this policy at start.
    ``flash`` refuses to start where it does not."""

    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Record forwards of few rows (plain rounds, verification, drafts) per shape and run them again: starting
    hundreds of kernels takes longer than small ones run. In ``fast`` numerics on CUDA. ``auto``: where a
    recorded forward agrees with a plain one at start. ``always`` refuses to start where it does not."""

    verify: Literal["coupled", "block", "token"] = "coupled"
    threads: int = 0
    """Threads of the kernels; 0: one per physical core this process may use."""

    max_batch: int = 32
    """Most sequences decoding at once."""

    max_context_tokens: int = 2048
    """Prompt and new tokens of one sequence; also capped by the policy's own limit."""

    kv_tokens: int = 0
    """Token slots of the KV pool; 0: ``max_batch * max_context_tokens``, capped at ``kv_bytes``."""

    kv_bytes: int = 4 << 30
    """Most memory of the KV pool, at least ``KV_BYTES_LEAST``; an engine asks for one full sequence of it."""

    prefill_chunk_tokens: int = 512
    """Most prompt rows mixed into one round."""

    prefix_cache: bool = True
    """Reuse full prompt pages written by the same policy version."""

    emit_s: float = 0.05
    """Plain rounds of the compiled decoder hand out their tokens once in so long, endings and first tokens at
    once: nothing is done for each sequence in between. 0: in every round. The text is the same."""

    def __post_init__(self) -> None:
        check_settings(
            "engine",
            self,
            max_batch=1,
            max_context_tokens=1,
            prefill_chunk_tokens=1,
            kv_bytes=KV_BYTES_LEAST,
            emit_s=0.0,
        )
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(f"engine.device must name a device, got {self.device!r}")
        for setting, fast_only in (
            (f"engine.attention={self.attention}", self.attention == "flash"),
            (f"engine.cuda_graphs={self.cuda_graphs}", self.cuda_graphs == "always"),
        ):
            if fast_only and self.numerics == "exact":
                raise ConfigError(
                    f"{setting} and engine.numerics=exact exclude each other: rows computed together share "
                    "no bits with rows computed alone. Set engine.numerics=fast, or leave the other at auto"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """How many hosts, and how they are reached and kept alive."""

    hosts: int = 1
    ray_address: str | None = None
    """None: start a local Ray; ``auto`` or an address joins an existing cluster."""

    host_cpus: float = 1.0
    host_gpus: float = 0.0
    threads_per_host: int = 0
    """0: the machine's cores divided by the hosts on it."""

    max_restarts: int = 3
    """Restarts of one host before it stays dead."""

    max_attempts: int = 3
    """Times one request is sent before it fails with ``HostLostError``."""

    call_timeout_s: float = 60.0
    """A host that leaves a control call unanswered for so long counts as dead."""

    object_store_bytes: int = 1 << 30
    name: str = "rollout-service"
    """The service's name in the cluster, by which another process connects to it."""

    start_timeout_s: float = 600.0
    """A host that is not ready after so long is an error: missing resources, or a broken start. One that was
    restarted has as long again to load the current weights."""

    stall_timeout_s: float = 300.0
    """A host whose round, or command between two, runs longer than this counts as dead."""

    health_every_s: float = 1.0
    flush_s: float = 0.1
    """A host tells new tokens once in so long; the first after a pause, and endings, at once. A message costs
    two processes some milliseconds, which small policies feel in their rounds. 0: after every round."""

    generate_slots: int = 1024
    """``generate`` calls in progress at once; further ones wait. Control calls have their own."""

    max_in_flight_per_host: int = 0
    """Requests a host may hold, waiting ones included; 0: twice the engine's ``max_batch``."""

    allow_other_numerics: bool = False
    """Re-run a lost request on a host of another numerics fingerprint, labelled as such, instead of
    failing it; also lets hosts of different fingerprints serve together."""

    def __post_init__(self) -> None:
        check_settings(
            "service",
            self,
            positive=("call_timeout_s", "start_timeout_s", "stall_timeout_s", "health_every_s"),
            hosts=1,
            max_attempts=1,
            generate_slots=1,
            object_store_bytes=SMALLEST_STORE_BYTES,
        )
        if self.host_gpus > 1 and self.host_gpus % 1:
            raise ConfigError(f"service.host_gpus above 1 must be whole, got {self.host_gpus}")
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("service.name must not be empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig:
    """Where numbers go beside the JSONL that is always written."""

    kind: Literal["jsonl", "wandb", "trackio", "tensorboard"] = "jsonl"
    project: str = "taildraft"
    name: str | None = None
    offline: bool = True
    parquet: bool = False

    def __post_init__(self) -> None:
        check_settings("tracker", self)
        for name in ("project", "name"):
            if getattr(self, name) == "":
                raise ConfigError(f"tracker.{name} must not be empty")
