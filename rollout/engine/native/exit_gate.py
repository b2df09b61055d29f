"""What a looped policy's exit gate says. ``taildraft evaluate`` reports it and nobody obeys it.

Every token runs all loops.

Shapes: R head rows, T loops.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.rows import RowBatch


def exit_gates(decoder: Decoder, batch: RowBatch, kv: KVStorage) -> Tensor:
    """Return the gate's value after every loop for the head rows, shape (R, T), before the sigmoid.

    Runs one full forward, which writes KV as any other. Raises ``UnsupportedError`` where there is no gate.
    """
    names = [f"loop.{t}" for t in range(decoder.spec.loops)]
    silent = replace(batch, head_rows_R=batch.head_rows_R[:0])
    taps = decoder.forward(silent, kv, taps=names).taps
    rows_R = batch.head_rows_R.long()
    return torch.stack([decoder.exit_gate(taps[name].cpu()[rows_R]) for name in names], dim=1)


def exit_probabilities(gates_RT: Tensor) -> Tensor:
    """Return the probability that a token would leave after each loop, shape (R, T); rows sum to 1.

    The gate's sigmoid is the chance to leave after a loop that was reached; after the last all leave.
    """
    leave_RT = gates_RT.sigmoid()
    leave_RT[:, -1] = 1.0
    reached_RT = torch.cat([torch.ones_like(leave_RT[:, :1]), (1 - leave_RT[:, :-1]).cumprod(1)], dim=1)
    return leave_RT * reached_RT
