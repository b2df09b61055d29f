"""vLLM's build for CPUs as a foreign arm: which environment, which modes, and how it is run.

The environment is what ``scripts/peers.sh`` makes. Every mode is one warm engine in its own process, with the
engine inside that process (no second hop), compiled, the OpenMP library its own documentation asks for,
and as many threads as ours. Its prefix cache is off, as ours is. Weights are bfloat16 where the processor
multiplies it, else float32: there its kernels refuse bfloat16 and it falls back to slower ones. Modes:

- ``vllm``: plain decoding, at the benchmark's temperature.
- ``vllm_ngram``: its n-gram drafts. Greedy: with random sampling its CPU build reads temperatures that were
  never written (vLLM issue 55005), so a text at T > 0 would not be the policy's.

Its other speculative modes need a drafter model or packages its CPU build does not bring.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.bench.foreign import Prompts
from rollout.bench.hf_arm import ReplayError, best_dtype
from rollout.bench.peer_process import PeerError, PeerProcess

WORKER = Path(__file__).with_name("vllm_worker.py")
DEFAULT_ENV = Path(__file__).resolve().parents[2] / ".venv-peers"

VLLM, VLLM_NGRAM = "vllm", "vllm_ngram"
SPECULATIVE: Mapping[str, dict[str, Any] | None] = {
    VLLM: None,
    VLLM_NGRAM: {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
}
"""By mode, its settings for vLLM."""

OPEN_TIMEOUT_S = 400.0
"""Building and compiling one engine takes one to two minutes on two cores."""

RUN_TIMEOUT_S = 600.0
KV_GIB = 1
"""Its KV memory: 45,000 tokens of the embedded policy."""

WARM_TOKENS = 4
TRIAL_PROMPT = tuple(range(3, 19))
"""Ids every vocabulary has."""


def peers_python(env: str | None) -> Path:
    """Return the Python of the peers' environment. Raises ``PeerError`` when there is none."""
    folder = Path(env).expanduser() if env is not None else DEFAULT_ENV
    python = folder / "bin" / "python"
    if not python.is_file():
        raise PeerError(f"no environment in {folder.name}: make one with scripts/peers.sh")
    return python


@dataclass(kw_only=True, slots=True)
class VllmArm:
    """One mode of vLLM, warm."""

    mode: str
    process: PeerProcess
    versions: Mapping[str, str]
    dtype: str
    rows_warmed: set[int] = field(default_factory=set)
    """Batches that ran once: what is compiled or allocated for one is not measured."""

    def prepare(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> Mapping[str, Any]:
        """Run this batch once, short; nothing is chosen."""
        if len(prompts) not in self.rows_warmed:
            self.replay(prompts, [WARM_TOKENS] * len(prompts), temperature=temperature)
            self.rows_warmed.add(len(prompts))
        return {}

    def replay(self, prompts: Prompts, lengths: Sequence[int], *, temperature: float) -> float:
        """Generate exactly ``lengths[i]`` tokens for prompt i; return seconds. Raises ``PeerError``."""
        answer = self.process.ask(
            "run",
            timeout_s=RUN_TIMEOUT_S,
            prompts=[list(ids) for ids in prompts],
            lengths=list(lengths),
            temperature=self.temperature(temperature),
        )
        if answer["counts"] != list(lengths):
            raise ReplayError(f"{self.mode}: {answer['counts']} new tokens instead of {list(lengths)}")
        return float(answer["seconds"])

    def temperature(self, asked: float) -> float:
        """Return the temperature the mode runs at: with drafts it is greedy."""
        return asked if SPECULATIVE[self.mode] is None else 0.0

    def told(self, asked: float) -> dict[str, Any]:
        """Return the conditions of this arm."""
        return {
            "versions": dict(self.versions),
            "dtype": self.dtype,
            "temperature": self.temperature(asked),
            "speculative": SPECULATIVE[self.mode],
            "idle_cpu_frac": self.process.idle_cpu_frac,
        }


def open_vllm(
    mode: str, python: Path, folder: Path, *, threads: int, max_batch: int, max_context_tokens: int
) -> VllmArm:
    """Start the process, build its engine and try it. Raises ``PeerError`` with what it said of a refusal."""
    dtype = str(best_dtype()).removeprefix("torch.")
    process = PeerProcess(
        # -P: the script's folder must not come before its environment's packages.
        [str(python), "-P", str(WORKER)],
        environment=_environment(python, threads),
        name=mode,
    )
    try:
        answer = process.ask(
            "open",
            timeout_s=OPEN_TIMEOUT_S,
            folder=str(folder),
            dtype=dtype,
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            speculative=SPECULATIVE[mode],
        )
        arm = VllmArm(mode=mode, process=process, versions=answer["versions"], dtype=dtype)
        # An instruction this processor lacks may only show in a forward.
        arm.replay([TRIAL_PROMPT], [WARM_TOKENS], temperature=1.0)
    except (PeerError, ReplayError) as error:
        process.close()
        raise PeerError(str(error)) from error
    return arm


def _environment(python: Path, threads: int) -> dict[str, str]:
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    preloaded = [str(openmp)] if openmp.is_file() else []
    already = os.environ.get("LD_PRELOAD")
    return {
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",  # ms a thread stays awake after its work, as vLLM sets it: idle engines sleep
        "LD_PRELOAD": ":".join([*preloaded, *([already] if already else [])]),
        "PYTHONPATH": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ours are not bound to cores either
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
