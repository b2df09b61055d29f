"""The foreign arm: transformers generating as many tokens per row as we did, as fast as it can here.

It samples other texts, so it replays our lengths: no row ends at an end-of-sequence id, and every row stops
at its own length. Three ways are tried in a short pilot and the fastest is measured:

- ``rows dropped, sdpa`` / ``rows dropped, eager``: the loop of ``generate`` over its own growing cache, left
  padded, with finished rows taken out of the batch. ``generate`` itself keeps computing finished rows until
  the last one ends, so this favours transformers.
- ``continuous``: its continuous batching (``generate_batch`` and its manager), where it runs on this device.

bfloat16 where the processor multiplies it in hardware, else float32: emulated bfloat16 is far slower.
Shapes: B rows, T prompt tokens, V vocabulary.
"""

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from drafters.kernels.build import cpu_features
from rollout.errors import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Way = Literal["rows dropped, sdpa", "rows dropped, eager", "continuous"]
WAYS: tuple[Way, ...] = ("rows dropped, sdpa", "rows dropped, eager", "continuous")

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Processor flags of bfloat16 products: AVX-512, AMX, Arm."""

PILOT_SHARE = 8
"""The pilot replays this fraction of every length: the same drain in miniature."""

PAGE_TOKENS = 64
PROMPT_ROWS = 512
"""Most rows of one continuous batch; as many prompt rows as our own engine takes by default."""


class ReplayError(RolloutError):
    """The foreign engine did not produce what it was told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pilot:
    """What the pilot found."""

    chosen: Way
    seconds: Mapping[str, float]
    """By way, of the shortened drain."""

    failed: Mapping[str, str]
    """Ways that do not work here, and why."""


def best_dtype() -> torch.dtype:
    """Return the dtype in which this processor runs transformers fastest."""
    flags = cpu_features().split()
    return torch.bfloat16 if any(flag in flags for flag in BF16_FLAGS) else torch.float32


class HfArm:
    """A transformers model of the policy's folder, and how to run it."""

    def __init__(self, folder: Path, *, threads: int, dtype: torch.dtype | None = None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as their_logging

        their_logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.dtype = dtype or best_dtype()
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def choose(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, temperature: float
    ) -> Pilot:
        """Time every way on a shortened drain and return the fastest."""
        short = [max(1, n // PILOT_SHARE) for n in lengths]
        seconds: dict[str, float] = {}
        failed: dict[str, str] = {}
        for way in WAYS:
            try:
                self.replay(prompts, [min(n, 2) for n in short], temperature=temperature, way=way)
                times = [self.replay(prompts, short, temperature=temperature, way=way) for _ in range(2)]
                seconds[way] = min(times)
            except (RuntimeError, ValueError, ImportError, ReplayError) as error:
                failed[way] = f"{type(error).__name__}: {error}".splitlines()[0]
                log.warning("transformers, %s: does not work here: %s", way, failed[way])
        if not seconds:
            raise ReplayError(f"transformers runs in no way here: {failed}")
        chosen = next(way for way in WAYS if seconds.get(way) == min(seconds.values()))
        log.info("hf: %s in %s (pilot: %s)", chosen, self.dtype, seconds)
        return Pilot(chosen=chosen, seconds=seconds, failed=failed)

    def replay(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        *,
        temperature: float,
        way: Way,
    ) -> float:
        """Generate exactly ``lengths[i]`` tokens for prompt i and return the seconds it took.

        Raises ``ReplayError`` when any row has another length.
        """
        self._model.set_attn_implementation("eager" if way.endswith("eager") else "sdpa")
        with torch.inference_mode():
            if way == "continuous":
                seconds, counts = self._continuous(prompts, lengths, temperature)
            else:
                started = time.perf_counter()
                counts = self._rows_dropped(prompts, lengths, temperature)
                seconds = time.perf_counter() - started
        if counts != list(lengths):
            raise ReplayError(f"{way}: {counts} new tokens instead of {list(lengths)}")
        return seconds

    # ---- the loop of generate, rows dropped ---------------------------------------------------------

    def _rows_dropped(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float
    ) -> list[int]:
        from transformers import DynamicCache

        eos_ids = self._eos_ids()
        generator = torch.Generator().manual_seed(0)
        counts = [0] * len(prompts)
        rows = list(range(len(prompts)))
        input_BT, mask_BT = _left_padded(prompts)
        position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        cache: Any = DynamicCache(config=self._model.config)
        while rows:
            out = self._model(
                input_ids=input_BT,
                attention_mask=mask_BT,
                position_ids=position_BT,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
            chosen_B1 = _sample(out.logits[:, -1].float(), eos_ids, temperature, generator)
            for row in rows:
                counts[row] += 1
            going = [i for i, row in enumerate(rows) if counts[row] < lengths[row]]
            position_B1 = position_BT[:, -1:] + 1
            if len(going) < len(rows):
                keep = torch.tensor(going, dtype=torch.long)
                rows = [rows[i] for i in going]
                if not rows:
                    break
                cache.batch_select_indices(keep)
                chosen_B1, mask_BT, position_B1 = chosen_B1[keep], mask_BT[keep], position_B1[keep]
            input_BT, position_BT = chosen_B1, position_B1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=-1)
        return counts

    def _eos_ids(self) -> list[int]:
        ids = self._model.generation_config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    # ---- continuous batching ------------------------------------------------------------------------

    def _continuous(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float
    ) -> tuple[float, list[int]]:
        """Return seconds and new tokens by row. Setting the manager up is not counted."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        pages = sum(-(-(len(p) + n) // PAGE_TOKENS) + 1 for p, n in zip(prompts, lengths, strict=True))
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}), eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=PROMPT_ROWS,
            allow_block_sharing=False,
            seed=0,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=60
        ) as manager:
            started = time.perf_counter()
            for row, (prompt, most) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(list(prompt), request_id=str(row), max_new_tokens=most)
            counts: dict[int, int] = {}
            while len(counts) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    counts[int(result.request_id)] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise ReplayError(f"continuous batching stopped after {len(counts)} rows")
            seconds = time.perf_counter() - started
        return seconds, [counts[row] for row in range(len(prompts))]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, both BT; padding comes first, so that all rows go on at one position."""
    width = max(len(p) for p in prompts)
    input_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    return input_BT, mask_BT


def _sample(
    logits_BV: Tensor, eos_ids: Sequence[int], temperature: float, generator: torch.Generator
) -> Tensor:
    """Return one id per row, shape (B, 1), never an end-of-sequence id."""
    if eos_ids:
        logits_BV[:, list(eos_ids)] = -torch.inf
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    probs_BV = (logits_BV / temperature).softmax(-1)
    return torch.multinomial(probs_BV, 1, generator=generator)
