"""Chains computed serially, row by row at full depth: what plain decoding alone computes of them.

Shapes: L loops, T positions, D hidden, V vocabulary, N positions of all chains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder
from rollout.engine.native.exit_gate import exit_probabilities
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import RowBatch
from rollout.evaluation.forced import Chain
from rollout.evaluation.recording import RecordingDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """What a run computed of one chain."""

    states: Mapping[tuple[int, int], Tensor]
    """(D,) by loop and position: all of them, or those that a run left where they can be looked at."""

    logits_TV: Tensor
    """From the prompt's last position on: where tokens are chosen."""

    keys_and_values: Tensor
    """By plane, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitReport:
    """What the exit gate says of the chains' positions. Nobody obeys it: every token runs all loops."""

    positions: int
    leaves_after: tuple[float, ...]
    """By loop, the mean probability that a token would leave after it; they sum to 1."""

    @property
    def mean_loops(self) -> float:
        """Loops a token would run on average."""
        return sum(loop * share for loop, share in enumerate(self.leaves_after, start=1))

    def line(self) -> str:
        """Return it in words."""
        shares = ", ".join(f"{share:.3f}" for share in self.leaves_after)
        return (
            f"exit gate: a token would leave after {self.mean_loops:.2f} loops on average (by loop {shares})"
        )


class SerialReference:
    """Every chain computed so, by the decoder whose reuse is to be judged."""

    def __init__(self, decoder: Decoder, chains: Sequence[Chain]) -> None:
        self._decoder = decoder
        recorder = RecordingDecoder(decoder)
        pages = [pages_for(len(chain.fed)) for chain in chains]
        storage = recorder.new_storage(sum(pages))
        table_SP = torch.zeros(len(chains), max(pages), dtype=torch.int32)
        for slot, count in enumerate(pages):
            first = sum(pages[:slot])
            table_SP[slot, :count] = torch.arange(first, first + count, dtype=torch.int32)
        for slot, chain in enumerate(chains):
            for position, token in enumerate(chain.fed):
                recorder.forward(_one_row(token, position, slot, table_SP), storage)
        self.chains = chains
        self.computed = [
            Computed(
                states=recorder.kept.states(slot),
                logits_TV=recorder.logits(slot, chain.chosen_after),
                keys_and_values=recorder.kept.keys_and_values(slot, len(chain.fed)),
            )
            for slot, chain in enumerate(chains)
        ]

    def exits(self) -> ExitReport | None:
        """Return what the exit gate says of all positions, None where there is no gate."""
        if not self._decoder.spec.exit_gate:
            return None
        gates = []
        for loop in range(self._decoder.spec.loops):
            states = [state for c in self.computed for (at, _), state in c.states.items() if at == loop]
            gates.append(self._decoder.exit_gate(torch.stack(states)))
        shares_L = exit_probabilities(torch.stack(gates, dim=1)).mean(0)
        return ExitReport(positions=len(gates[0]), leaves_after=tuple(shares_L.tolist()))


def _one_row(token: int, position: int, slot: int, table_SP: Tensor) -> RowBatch:
    def one(number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int32)

    return RowBatch(
        token_ids_M=one(token),
        positions_M=one(position),
        table_M=one(slot),
        page_table_SP=table_SP,
        head_rows_R=one(0),
    )
