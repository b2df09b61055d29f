"""What ``numerics=exact`` costs over ``fast``: time of the same forwards under both."""

import statistics
from collections.abc import Mapping
from dataclasses import replace

from controller.types import POLICY
from drafters.config import DrafterConfig
from rollout.config import EngineConfig
from rollout.engine.native.build import engine_of
from rollout.engine.native.compiled_forward.decoder import compiled_unavailable
from rollout.policy.source import Policy

BATCHES = (1, 8)
REPEATS = 3
CONTEXT_TOKENS = 64


def exact_over_fast(policy: Policy, config: EngineConfig) -> Mapping[str, float | str]:
    """Return the ratio of the times, by batch, and how it was found."""
    if config.decoder != "torch" and config.device == "cpu" and config.dtype == "bfloat16":
        unavailable = compiled_unavailable()
        if unavailable is None:
            return {"ratio": 1.0, "how": "by construction: the compiled decoder has one set of kernels"}
    none = DrafterConfig(names=())
    small = replace(config, max_batch=max(BATCHES), max_context_tokens=4 * CONTEXT_TOKENS)
    engines = {
        "exact": engine_of(policy, replace(small, numerics="exact"), none),
        "fast": engine_of(policy, replace(small, numerics="fast"), none),
    }
    out: dict[str, float | str] = {}
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(REPEATS + 1):
            for name, engine in engines.items():
                times[name].append(
                    engine.time_forward(POLICY, rows=batch, context_tokens=CONTEXT_TOKENS, sequences=batch)
                )
        exact_s, fast_s = (statistics.median(times[n][1:]) for n in ("exact", "fast"))
        out[f"batch_{batch}"] = exact_s / fast_s
    out["ratio"] = max(float(v) for v in out.values())
    out["how"] = f"measured, {REPEATS} interleaved forwards each after one to warm up"
    return out
