"""What a looped policy is trained on: cross entropy of every loop, the deepest teaching the others.

Trained on the last loop's loss alone, the earlier loops predict next to nothing and draft badly. The
distillation term can also ride along in a trainer that computes its own loss (see ``with_gradient_of``).

Shapes: N scored positions, V vocabulary, D loops.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""A label that is not scored, as torch and transformers have it."""


def cross_entropy_by_loop(logits_by_loop: Sequence[Tensor], labels_N: Tensor) -> list[Tensor]:
    """Return the mean cross entropy of each loop's logits (each NV), in nats, in loop order."""
    return [F.cross_entropy(logits_NV.float(), labels_N) for logits_NV in logits_by_loop]


def distillation(logits_by_loop: Sequence[Tensor]) -> Tensor:
    """Return the mean over the shallower loops of KL(last loop || loop), the last loop held fixed.

    The teacher gets no gradient: shallow loops move towards the deepest, never the deepest towards them.
    """
    *shallow, deepest_NV = logits_by_loop
    if not shallow:
        return deepest_NV.new_zeros(())
    teacher_NV = F.log_softmax(deepest_NV.detach().float(), dim=-1)
    terms = [
        F.kl_div(F.log_softmax(s_NV.float(), dim=-1), teacher_NV, log_target=True, reduction="batchmean")
        for s_NV in shallow
    ]
    return torch.stack(terms).mean()


def gate_loss(gates_by_loop: Sequence[Tensor], logits_by_loop: Sequence[Tensor], labels_N: Tensor) -> Tensor:
    """Return the exit gates' loss: leave after a loop unless the next one improves the token's cross entropy.

    The target of going on is sigmoid(50 * (improvement - 0.005)), the improvement in nats and at least 0, as
    Ouro's second stage has it. Only the gates get a gradient from it when they read detached states; the
    last loop's gate decides nothing and has no target.
    """
    with torch.no_grad():
        each = [F.cross_entropy(logits.float(), labels_N, reduction="none") for logits in logits_by_loop]
        stay = [torch.sigmoid(50 * ((a - b).clamp(min=0) - 0.005)) for a, b in pairwise(each)]
    terms = [
        F.binary_cross_entropy_with_logits(gate_N, 1 - stay_N)
        for gate_N, stay_N in zip(gates_by_loop, stay, strict=False)
    ]
    return torch.stack(terms).mean()


class _GradientOf(torch.autograd.Function):
    """Identity on its first argument; on the way back the second, a loss, gets gradient 1."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        """Return ``value``, its data shared."""
        ctx.loss_like = (loss.dtype, loss.device)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of ``value`` unchanged, and 1 for the loss."""
        dtype, device = ctx.loss_like
        return gradients[0], torch.ones((), dtype=dtype, device=device)


def with_gradient_of(value: Tensor, loss: Tensor) -> Tensor:
    """Return ``value``; whoever differentiates through it also adds the gradient of ``loss``.

    So an auxiliary loss reaches the weights under a trainer that only sees ``value``. It is added once per
    backward pass, whatever the trainer's own loss is scaled by.
    """
    attached: Tensor = _GradientOf.apply(value, loss)  # type: ignore[no-untyped-call]
    return attached
