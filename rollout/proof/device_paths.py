"""Whether the fast paths of CUDA, flash-attn and recorded forwards, compute what plain ones do on a device.

The reference is the torch decoder in float64 on the CPU, one row at a time, as in ``device.py``. On a CPU the
recorder runs its function again, so what runs there is all but the recording.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.fast_paths import self_check_logits
from rollout.engine.native.torch_forward.flash_attention import FlashAttention
from rollout.engine.native.torch_forward.flash_kernels import find_flash
from rollout.engine.native.torch_forward.forward_graphs import CudaRecorder, EagerRecorder, Recorder
from rollout.errors import UnsupportedError
from rollout.proof.device import (
    FAMILIES,
    LOGIT_TOLERANCE,
    VOCAB,
    DeviceFinding,
    decoder_on,
    largest,
    not_run,
    oracle_drafter,
    ran,
)
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import MIXED_PARAMS, ar_plan, fixed_plan, requests_for, run_engine, tiny_engine


def recorder_on(device: str) -> Recorder:
    """Return what records forwards on a device."""
    return CudaRecorder(torch.device(device)) if device.startswith("cuda") else EagerRecorder()


def check_flash_attention(device: str) -> DeviceFinding:
    """Prompts by lengths, drafts over cached keys, and the latter in buckets, with and without windows."""
    if not device.startswith("cuda"):
        return not_run(f"flash-attn runs on CUDA, not on {device}")
    try:
        flash = FlashAttention(find_flash(torch.cuda.get_device_capability(device)))
    except UnsupportedError as error:
        return not_run(str(error))
    worst = {"ragged": 0.0, "buckets": 0.0, "recorded": 0.0}
    for family in FAMILIES:
        policy = tiny_policy(family=family, vocab=VOCAB)
        expected = _expected(policy)
        plain = decoder_on(policy, device, torch.bfloat16)
        recorders = {"ragged": None, "buckets": EagerRecorder(), "recorded": recorder_on(device)}
        for name, recorder in recorders.items():
            worst[name] = largest([worst[name], _apart(plain.with_fast_paths(flash, recorder), expected)])
    most = LOGIT_TOLERANCE[torch.bfloat16]
    return ran(
        largest(worst.values()) <= most, kernels=flash.description, families=list(FAMILIES), worst=worst
    )


def check_recorded_forwards(device: str) -> DeviceFinding:
    """Recorded forwards against the CPU and against the same buckets run eagerly, and what they write."""
    worst = dict.fromkeys(LOGIT_TOLERANCE, 0.0)
    bits_equal: dict[str, bool] = {}
    untouched = True
    for family in FAMILIES:
        policy = tiny_policy(family=family, vocab=VOCAB)
        expected = _expected(policy)
        for dtype in LOGIT_TOLERANCE:
            plain = decoder_on(policy, device, dtype)
            recorded, buckets = (
                plain.with_fast_paths(plain.attention, recorder)
                for recorder in (recorder_on(device), EagerRecorder())
            )
            found = self_check_logits(recorded)
            worst[dtype] = largest([worst[dtype], float((found - expected).abs().max())])
            bits_equal[f"{family} {dtype}"] = torch.equal(found, self_check_logits(buckets))
            untouched = untouched and leaves_others_untouched(recorded)
    close = all(worst[dtype] <= most for dtype, most in LOGIT_TOLERANCE.items())
    return ran(
        close and untouched,
        recorder=recorder_on(device).description,
        worst={str(dtype): apart for dtype, apart in worst.items()},
        bits_of_the_same_buckets_run_eagerly=bits_equal,
        others_untouched=untouched,
    )


def check_recorded_speculation(device: str) -> DeviceFinding:
    """Whole rollouts with recorded drafts and verification; texts may differ from plain ones as bits do."""
    policy = tiny_policy(family="smollm2", vocab=VOCAB)
    plain = decoder_on(policy, device, torch.float32)
    recorded = plain.with_fast_paths(plain.attention, recorder_on(device))
    engine = tiny_engine(policy, [oracle_drafter()], decoder=recorded, exact=False)
    reference = tiny_engine(policy, decoder=plain, exact=False)
    requests = requests_for(vocab=VOCAB, prompts=4, samples=2, params=MIXED_PARAMS)
    expected = run_engine(reference, requests, ar_plan)
    found = run_engine(engine, requests, fixed_plan("w4", 3))
    drafted = sum(c.provenance.drafted for c in found.values() if c.provenance is not None)
    accepted = sum(c.provenance.accepted for c in found.values() if c.provenance is not None)
    whole = all(c.error is None for c in found.values())
    return ran(
        whole and 0 < accepted <= drafted,
        samples=len(found),
        equal=sum(found[key].token_ids == expected[key].token_ids for key in expected),
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )


def leaves_others_untouched(decoder: TorchDecoder) -> bool:
    """Whether a forward of three rows, in a bucket of four, writes but their slots and the spare page."""
    storage = decoder.new_storage(6)
    assert isinstance(storage, TorchKV)
    for store in (storage.keys, storage.values):
        store.copy_(torch.linspace(-1, 1, store.numel(), device=store.device).view_as(store))
    rows = [(0, 20), (0, 21), (1, 3)]
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    batch = RowBatch(
        token_ids_M=torch.tensor([3, 4, 5], dtype=torch.int32),
        positions_M=torch.tensor([position for _, position in rows], dtype=torch.int32),
        table_M=torch.tensor([sequence for sequence, _ in rows], dtype=torch.int32),
        page_table_SP=table,
        head_rows_R=torch.arange(3, dtype=torch.int32),
    )
    others = torch.ones(storage.keys.shape[1], dtype=torch.bool)
    for sequence, position in rows:
        others[int(table[sequence, position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS] = False
    written = others.logical_not()
    others[storage.pages * PAGE_TOKENS :] = False
    before = storage.keys.cpu().clone(), storage.values.cpu().clone()
    decoder.forward(batch, storage)
    stores = list(zip(before, (storage.keys.cpu(), storage.values.cpu()), strict=True))
    if any(torch.equal(old[:, written], new[:, written]) for old, new in stores):
        return False
    return all(torch.equal(old[:, others], new[:, others]) for old, new in stores)


def _expected(policy: TinyPolicy) -> Tensor:
    return self_check_logits(decoder_on(policy, "cpu", torch.float64, exact=True))


def _apart(decoder: TorchDecoder, expected: Tensor) -> float:
    return float((self_check_logits(decoder) - expected).abs().max())


PATH_CHECKS: Mapping[str, Callable[[str], DeviceFinding]] = {
    "flash_attention": check_flash_attention,
    "recorded_forwards": check_recorded_forwards,
    "recorded_speculation": check_recorded_speculation,
}
"""In the order they are made."""
