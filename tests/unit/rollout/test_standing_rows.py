"""Rows that have had different numbers of loops go on from there: the bits of one whole forward."""

import pytest
import torch
from torch import Tensor

from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.depths import Standing, forward_from
from rollout.engine.native.pass_clock import PassClock
from rollout.engine.native.rows import RowBatch, int32, rows_of
from rollout.testing import tiny_looped_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import tiny_decoder

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

LOOPS, VOCAB = 4, 48
LENGTHS = (20, 5)


def batch() -> RowBatch:
    """Every position of two sequences, one of them over a page's end; some rows want logits."""
    rows = sum(LENGTHS)
    return RowBatch(
        token_ids_M=int32([(7 * m + 3) % VOCAB for m in range(rows)]),
        positions_M=int32([p for length in LENGTHS for p in range(length)]),
        table_M=int32([s for s, length in enumerate(LENGTHS) for _ in range(length)]),
        page_table_SP=torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        head_rows_R=int32([0, 6, 19, 22, 24]),
    )


class Whole:
    """One forward of all rows and loops, and the states it passed."""

    def __init__(self, threads: int) -> None:
        decoder = tiny_decoder(tiny_looped_policy(loops=LOOPS), compiled=True, threads=threads)
        assert isinstance(decoder, CompiledDecoder)
        self.decoder = decoder
        self.kv = decoder.new_storage(4)
        taps = [f"loop.{loop}" for loop in range(LOOPS)]
        result = decoder.forward(batch(), self.kv, taps=taps)
        self.logits_RV = result.logits_RV.clone()
        self.after = {loop + 1: result.taps[f"loop.{loop}"].clone() for loop in range(LOOPS)}

    def standing(self, depths: list[int]) -> tuple[Standing, CompiledKV]:
        """Return where rows stand, and KV memory in which only what they have had is right."""
        kv = self.decoder.new_storage(4)
        kv.data.copy_(self.kv.data)
        garbage_MD = torch.full((sum(LENGTHS), self.decoder.spec.hidden_size), 0.5)
        for loop in range(LOOPS):
            missing_K = int32([m for m, depth in enumerate(depths) if depth <= loop])
            self.decoder.block(garbage_MD[missing_K], rows_of(batch(), missing_K), kv, loop=loop)
        states_MD = garbage_MD.clone()
        for m, depth in enumerate(depths):
            if depth:
                states_MD[m] = self.after[depth][m]
        # States stand in any order, some of nobody's between them.
        numbers = [2 * (len(depths) - 1 - m) for m in range(len(depths))]
        states_ND = torch.full((2 * len(depths), states_MD.shape[1]), float("nan"))
        states_ND[numbers] = states_MD
        return Standing(depths=depths, states_ND=states_ND, numbers=numbers), kv


DEPTHS = {
    "all deep": [3] * sum(LENGTHS),
    "two depths": [2 * (m % 2) for m in range(sum(LENGTHS))],
    "every depth": [(m * m) % LOOPS for m in range(sum(LENGTHS))],
    "none at its token": [1 + m % 3 for m in range(sum(LENGTHS))],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS)
def test_in_one_call_or_pass_by_pass_the_bits_are_those_of_a_whole_forward(
    depths: list[int], threads: int
) -> None:
    whole = Whole(threads)
    decoders: list[Decoder] = [whole.decoder, CountingDecoder(whole.decoder)]
    for decoder in decoders:
        clock = PassClock()
        standing, kv = whole.standing(depths)
        assert not torch.equal(kv.data, whole.kv.data)
        logits_RV = forward_from(decoder, batch(), kv, standing, clock=clock)
        assert torch.equal(logits_RV, whole.logits_RV)
        assert torch.equal(kv.data, whole.kv.data)
        taken = clock.take()
        assert taken.split is not None
        assert 0 < taken.split.linears_s < taken.forward_s


def refused(depths: list[int], states_ND: Tensor, numbers: list[int]) -> str:
    whole = Whole(1)
    with pytest.raises(ValueError, match=r".") as error:
        whole.decoder.forward_from(batch(), whole.kv, depths=depths, numbers=numbers, states_ND=states_ND)
    return str(error.value)


def test_depths_and_states_that_cannot_be_are_refused() -> None:
    rows, hidden = sum(LENGTHS), tiny_looped_policy(loops=LOOPS).spec.hidden_size
    states_ND = torch.zeros(3, hidden)
    none = [0] * rows
    for depth in (-1, LOOPS):
        assert "loop" in refused([depth, *none[1:]], states_ND, none)
    assert "every row" in refused([0], states_ND, none)
    assert "every row" in refused(none, states_ND, [0])
    assert "float32" in refused(none, states_ND.double(), none)
    for number in (-1, 3):
        assert "name rows" in refused(none, states_ND, [number, *none[1:]])
    assert "hidden states must be" in refused(none, states_ND[:, 1:].contiguous(), none)
