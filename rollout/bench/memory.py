"""Peak memory of a process that hosts an engine, beside what it has to hold.

``python -m rollout.bench.memory`` prints it for the embedded policy. A process of its own is measured, since
a peak is of a whole life, loading included. Linux only: the numbers are the kernel's.

Two ratios over weights, drafters and KV in use are told. ``peak_over_held`` is the whole process's. The goal
is judged by ``peak_beyond_baseline_over_held``: a process that has imported torch and transformers and read a
tokenizer holds some hundreds of MB before any weight. Those are about the same for every policy, outweigh a
small one, and say nothing of how weights, drafters and KV are kept.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from controller.types import Assignment, RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig
from rollout.errors import UnsupportedError
from rollout.types import Request, SamplingParams

W4 = "w4"
STATUS = Path("/proc/self/status")

LARGEST_RATIO = 1.25
"""What the process may hold at its peak beyond its baseline, over weights, drafters and KV in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryWork:
    """What the engine does while it is watched: every other round drafts, where there is a drafter."""

    batch: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 32
    gamma: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of one process. Resident sizes are the kernel's, parts the engine's own count."""

    baseline: int
    """Resident before any weight was kept: interpreter, libraries, tokenizer."""

    ready: int
    """Resident when the engine was ready."""

    peak: int
    """The most that was ever resident, from the first instruction on."""

    weights: int
    drafters: int
    kv_in_use: int
    """At the round that used most."""

    scratch: int

    @property
    def held(self) -> int:
        """What has to be there."""
        return self.weights + self.drafters + self.kv_in_use

    @property
    def peak_over_held(self) -> float:
        """The whole peak, interpreter and libraries included, over what has to be there."""
        return self.peak / self.held

    @property
    def peak_beyond_baseline_over_held(self) -> float:
        """The peak beyond the baseline, over what has to be there: what the goal is judged by."""
        return (self.peak - self.baseline) / self.held

    def lines(self) -> str:
        """Return both ratios and the baseline for people."""
        met = "met" if self.peak_beyond_baseline_over_held <= LARGEST_RATIO else "missed"
        return (
            f"peak over weights, drafters and KV in use: {self.peak_over_held:.2f}\n"
            f"the same beyond the baseline: {self.peak_beyond_baseline_over_held:.2f} "
            f"(<= {LARGEST_RATIO:g}: {met})\n"
            f"baseline, interpreter and libraries: {self.baseline / 1e6:.0f} MB of {self.peak / 1e6:.0f} MB\n"
        )


def memory_of_child(
    policy: PolicyConfig, engine: EngineConfig, drafter: DrafterConfig, work: MemoryWork
) -> MemoryUse:
    """Return what a fresh process used that served ``work``. Raises ``UnsupportedError`` off Linux."""
    if not STATUS.exists():
        raise UnsupportedError(f"memory is measured on Linux only: there is no {STATUS}")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_serve, policy, engine, drafter, work).result()


def _serve(
    policy_config: PolicyConfig, engine_config: EngineConfig, drafter_config: DrafterConfig, work: MemoryWork
) -> MemoryUse:
    from rollout.engine.native.build import engine_of, weights_dtype
    from rollout.policy.source import load_policy

    policy = load_policy(policy_config, dtype=weights_dtype(engine_config))
    baseline = resident("VmRSS")
    engine = engine_of(policy, engine_config, drafter_config)
    vocab_size = policy.spec.vocab_size
    del policy
    ready = resident("VmRSS")
    for index in range(work.batch):
        engine.add(_request(index, vocab_size, work))
    kv_in_use, rounds = 0, 0
    while engine.busy:
        load = engine.load()
        drafts = rounds % 2 == 1 and W4 in {t.name for t in engine.traits.drafters}
        engine.run_round(_plan(load, work.gamma if drafts else 0))
        kv_in_use = max(kv_in_use, engine.memory().kv_used)
        rounds += 1
    parts = engine.memory()
    return MemoryUse(
        baseline=baseline,
        ready=ready,
        peak=resident("VmHWM"),
        weights=parts.weights,
        drafters=parts.drafters,
        kv_in_use=kv_in_use,
        scratch=parts.scratch,
    )


def _request(index: int, vocab_size: int, work: MemoryWork) -> Request:
    # Unlike prompts, so that no page is shared.
    ids = tuple((7919 * (index + 1) + 31 * i) % vocab_size for i in range(work.prompt_tokens))
    params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
    return Request(prompt_uid=f"p{index}", sample_index=0, prompt_ids=ids, params=params, seed=index)


def _plan(load: RoundLoad, gamma: int) -> RoundPlan:
    drafted = {s.key: Assignment(drafter=W4, gamma=gamma) for s in load.sequences} if gamma else {}
    return RoundPlan(assignments=drafted, reason="memory")


def resident(name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` in bytes. ``ru_maxrss`` would count the parent's peak as well."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise UnsupportedError(f"{STATUS} has no {name}")


def main(argv: list[str] | None = None) -> int:
    """Print the measure as JSON, and in words on standard error; 0 when it is within ``LARGEST_RATIO``."""
    # Not above: the process that is measured imports this module, and is to hold no more than a host does.
    from rollout.bench.machine import commit, machine, versions
    from rollout.bench.result import SCHEMA
    from rollout.settings import to_plain

    parser = argparse.ArgumentParser(prog="python -m rollout.bench.memory", description=__doc__)
    parser.add_argument("--policy", default=PolicyConfig().source, help="a folder, or smollm2")
    for name, value in asdict(MemoryWork()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = vars(parser.parse_args(argv))
    source = options.pop("policy")
    work = MemoryWork(**options)
    context = work.prompt_tokens + work.new_tokens + 1
    policy = PolicyConfig(source=source)
    engine = EngineConfig(max_batch=work.batch, max_context_tokens=context)
    drafter = DrafterConfig(names=(W4,))
    parts = {"policy": policy, "engine": engine, "drafter": drafter}
    started_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    use = memory_of_child(policy, engine, drafter, work)
    conditions = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "config": {name: to_plain(part) for name, part in parts.items()},
        "started_utc": started_utc,
    }
    told = {
        "schema": SCHEMA,
        "workload": "memory",
        **asdict(use),
        "held": use.held,
        "peak_over_held": use.peak_over_held,
        "peak_beyond_baseline_over_held": use.peak_beyond_baseline_over_held,
        "ratio": use.peak_beyond_baseline_over_held,  # its name in earlier results
        "most": LARGEST_RATIO,
        "work": asdict(work),
        "conditions": conditions,
    }
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    sys.stderr.write(use.lines())  # what is printed to a file stays JSON
    return 0 if use.peak_beyond_baseline_over_held <= LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
