"""A second look at better logits: the compiled chooser shows it the tokens that rough ones rank first.

Shapes: R rows, V vocabulary.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.chooser_call import CHOOSE, SecondStruct, call_of
from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.target import TargetRow
from rollout.types import SamplingParams

LOOK = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_float),
)
TEMPERATURES = (0.0, 1e-7, 0.3, 1.0, 1.7)


def target_rows() -> list[TargetRow]:
    return [
        TargetRow(seed=7 * r, position=r + 3, params=SamplingParams(temperature=t))
        for r, t in enumerate(TEMPERATURES)
    ]


def second_choice(
    rough_RV: Tensor, better_RV: Tensor, *, listed: int, threads: int = 1
) -> tuple[list[int], list[bool], dict[int, list[int]]]:
    """Return tokens, whether they count, and by row what the second look was shown."""
    rows = target_rows()
    seen: dict[int, list[int]] = {}

    def look(_self: object, row: int, tokens: Sequence[int], count: int, out: list[float]) -> None:
        seen[row] = [tokens[i] for i in range(count)]
        for i, token in enumerate(seen[row]):
            out[i] = float(better_RV[row, token])

    function = LOOK(look)
    chooser = CompiledChooser(threads=threads)
    call, owned = call_of(rows, vocab_size=rough_RV.shape[1])
    tokens, finite = array("i", [-1] * len(rows)), array("B", [0] * len(rows))
    call.logits, call.row_stride, call.mode = rough_RV.data_ptr(), rough_RV.stride(0), CHOOSE
    call.tokens, call.finite = tokens.buffer_info()[0], finite.buffer_info()[0]
    call.second = SecondStruct(look=ctypes.cast(function, ctypes.c_void_p).value, tokens=listed)
    chooser._library.taildraft_choose(ctypes.byref(call), chooser._choosers)
    del owned
    return tokens.tolist(), [bool(f) for f in finite], seen


def scores_of(logits_RV: Tensor) -> Tensor:
    """Return (logit - highest) / T + noise, and the logits themselves of greedy rows, float64."""
    scores = []
    for logits_V, row in zip(logits_RV.double(), target_rows(), strict=True):
        t = row.params.temperature
        if t:
            key = noise.noise_key(row.seed, row.position)
            gumbel_V = noise.gumbel([key], vocab_size=logits_V.shape[0])[0]
            logits_V = (logits_V - logits_V.max()) / t + gumbel_V
        scores.append(logits_V)
    return torch.stack(scores)


def random_logits(vocab: int, seed: int, *, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(len(TEMPERATURES), vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("listed", [1, 5, 64])
@pytest.mark.parametrize("vocab", [30, 1000, 5003])
def test_the_tokens_that_lead_are_shown_and_the_better_logits_decide(
    vocab: int, listed: int, threads: int
) -> None:
    for seed in range(3):
        rough_RV = random_logits(vocab, seed, spread=(0.01, 3.0, 12.0)[seed])
        better_RV = rough_RV + random_logits(vocab, seed + 100, spread=0.7)
        tokens, finite, seen = second_choice(rough_RV, better_RV, listed=listed, threads=threads)
        rough, better = scores_of(rough_RV), scores_of(better_RV)
        assert all(finite)
        for r in range(len(TEMPERATURES)):
            leading = rough[r].topk(min(listed, vocab)).indices.tolist()
            assert seen[r] == leading
            assert tokens[r] == max(leading, key=lambda token: float(better[r, token]))


def test_ties_are_shown_and_decided_by_the_lowest_id() -> None:
    rough_RV = torch.zeros(len(TEMPERATURES), 200)
    rough_RV[:, 150:] = 1.0
    tokens, _, seen = second_choice(rough_RV, torch.zeros_like(rough_RV), listed=4)
    assert seen[0] == [150, 151, 152, 153]
    assert tokens[0] == 150


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_look_that_finds_no_number_spoils_its_row_alone(bad: float) -> None:
    rough_RV = random_logits(500, 1)
    better_RV = rough_RV.clone()
    better_RV[2] = bad
    tokens, finite, _ = second_choice(rough_RV, better_RV, listed=8)
    assert finite == [r != 2 for r in range(len(TEMPERATURES))]
    best = scores_of(rough_RV).argmax(-1).tolist()
    assert [t for t, ok in zip(tokens, finite, strict=True) if ok] == best[:2] + best[3:]
