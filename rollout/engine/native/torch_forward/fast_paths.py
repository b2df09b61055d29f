"""Which attention and which recorder a CUDA decoder runs: what was asked for, what is there, and what passed.

Neither flash-attn nor CUDA graphs has been run on hardware. Each is therefore compared, once the
policy is loaded, with what it replaces, on a few rows of this policy: ``auto`` takes what passes and says so,
and what was asked for by name refuses to start where it does not pass.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import FastAttention
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.flash_attention import FlashAttention
from rollout.engine.native.torch_forward.flash_kernels import FlashKernels, find_flash, flash_refusal
from rollout.engine.native.torch_forward.forward_graphs import CudaRecorder, Recorder
from rollout.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

MOST_DISAGREEMENT = 0.05
"""Largest difference of logits, relative to the largest logit, that summation order explains in bfloat16.
Rows that read a wrong key, or miss one, differ by far more."""

_PROMPT_TOKENS = 41
"""More than one page, and either half wider than what is read as decoding rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a device offers, as far as the choice depends on it."""

    capability: tuple[int, int]
    find_flash: Callable[[tuple[int, int]], FlashKernels] = find_flash
    recorder: Callable[[], Recorder] | None = None


def cuda_device(device: torch.device) -> Device:
    """Return what a CUDA device offers."""
    return Device(capability=torch.cuda.get_device_capability(device), recorder=lambda: CudaRecorder(device))


def refuse_off_device(config: EngineConfig) -> None:
    """Raise ``ConfigError`` where a fast path of CUDA is asked for by name on another device."""
    if config.device.startswith("cuda"):
        return
    for setting, needs_cuda in (
        (f"engine.attention={config.attention}", config.attention == "flash"),
        (f"engine.cuda_graphs={config.cuda_graphs}", config.cuda_graphs == "always"),
    ):
        if needs_cuda:
            raise ConfigError(f"{setting} needs engine.device=cuda, got {config.device}: leave it at auto")


def with_fast_paths(decoder: TorchDecoder, config: EngineConfig, device: Device) -> tuple[TorchDecoder, str]:
    """Return a decoder of the loaded policy with the fast paths that are asked for and pass, and their names.

    Raises ``ConfigError`` for one that is asked for by name and is not there, or does not pass. A decoder
    that computes every row alone has none.
    """
    if decoder.row_invariant:
        return decoder, ""
    attention = _attention(decoder, config, device)
    decoder = decoder.with_fast_paths(attention, None)
    recorder = _recorder(decoder, config, device)
    names = [f"attention={attention.description}", *([] if recorder is None else [recorder.description])]
    return decoder.with_fast_paths(attention, recorder), ", ".join(names)


def _attention(decoder: TorchDecoder, config: EngineConfig, device: Device) -> FastAttention:
    plain = decoder.attention
    if config.attention == "sdpa":
        return plain
    problem = flash_refusal(decoder.spec, decoder.dtype, device.capability)
    if problem is None:
        try:
            flash = FlashAttention(device.find_flash(device.capability))
        except UnsupportedError as error:
            problem = str(error)
        else:
            problem = _problem(decoder.with_fast_paths(flash, None), decoder)
            if problem is None:
                log.info("engine.attention: %s -> %s", config.attention, flash.description)
                return flash
    if config.attention == "flash":
        raise ConfigError(f"engine.attention=flash: {problem}. engine.attention=sdpa runs everywhere")
    log.warning("engine.attention: auto -> %s (%s)", plain.description, problem)
    return plain


def _recorder(decoder: TorchDecoder, config: EngineConfig, device: Device) -> Recorder | None:
    if config.cuda_graphs == "never" or device.recorder is None:
        return None
    recorder = device.recorder()
    problem = _problem(decoder.with_fast_paths(decoder.attention, recorder), decoder)
    if problem is None:
        log.info("engine.cuda_graphs: %s -> %s", config.cuda_graphs, recorder.description)
        return recorder
    if config.cuda_graphs == "always":
        raise ConfigError(f"engine.cuda_graphs=always: {problem}. engine.cuda_graphs=never does without them")
    log.warning("engine.cuda_graphs: auto -> never (%s)", problem)
    return None


def _problem(decoder: TorchDecoder, reference: TorchDecoder) -> str | None:
    """Return what is wrong with a decoder that ought to compute what ``reference`` does, or None."""
    try:
        apart = disagreement(decoder, reference)
    except Exception as error:  # noqa: BLE001 - whatever ails foreign kernels, there is a path without them
        return f"the self-check failed: {type(error).__name__}: {error}"
    if not apart <= MOST_DISAGREEMENT:
        return (
            f"the self-check found logits {apart:.3g} apart, relative to the largest, of what they should be"
        )
    return None


def disagreement(decoder: TorchDecoder, reference: TorchDecoder) -> float:
    """Return the largest difference of two decoders' logits, relative to the largest; infinite if not finite.

    Prompts, one of them in two chunks, plain rows and drafts of three sequences, in scratch memory. Drafts
    run twice: they are recorded, then what was recorded runs again.
    """
    found, expected = self_check_logits(decoder), self_check_logits(reference)
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def self_check_logits(decoder: TorchDecoder) -> Tensor:
    """Return the logits (R, V) of the self-check's rows, float64 on the CPU: the same for every decoder of a
    policy, as far as its numerics go."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.spec.vocab_size, (3, 64), generator=generator, dtype=torch.int32)
    storage = decoder.new_storage(3 * 64 // PAGE_TOKENS)
    table = torch.arange(storage.pages, dtype=torch.int32).view(3, -1).flip(1)

    def run(rows: list[tuple[int, int]]) -> Tensor:
        sequences, positions = (torch.tensor(part, dtype=torch.int32) for part in zip(*rows, strict=True))
        batch = RowBatch(
            token_ids_M=tokens[sequences.long(), positions.long()],
            positions_M=positions,
            table_M=sequences,
            page_table_SP=table,
            head_rows_R=torch.arange(len(rows), dtype=torch.int32),
        )
        return decoder.forward(batch, storage).logits_RV.double().cpu()

    longest = min(_PROMPT_TOKENS, decoder.positions - 3)
    first = (longest + 1) // 2
    prompts = [(0, p) for p in range(first)] + [(1, p) for p in range(5)] + [(2, 0)]
    chunk = [(0, p) for p in range(first, longest)]
    drafts = [(0, longest + i) for i in range(3)] + [(1, 5), (2, 1)]
    return torch.cat([run(rows) for rows in (prompts, chunk, drafts, drafts)])
