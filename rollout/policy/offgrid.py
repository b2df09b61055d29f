"""Moving a policy off the 4-bit grid its weights lie on, and saying what that did to it.

Weights that were once rounded to 4 bits make a 4-bit drafter look better than it is on trained
weights. Here each weight of a linear moves by up to a quarter of its group's own 4-bit step.

Shapes: N out features, K in features, C groups per row, G weights per group.
"""

import logging
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

MOVE_STEPS = 0.25
"""Half the largest move that keeps a weight nearest to its own grid point: plainly off the grid, and
still close to the policy it was."""

LEVELS = 15
"""Steps between the least and the greatest of sixteen values."""


def offgrid(state: Mapping[str, Tensor], *, group: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Return ``state`` with every linear's weights moved; norms, biases and other tensors are shared.

    The head moves as well; where it is tied, its one tensor (the embedding) moves once. The noise of a
    tensor depends on ``seed`` and its name alone.
    """
    head = "lm_head.weight" if "lm_head.weight" in state else "model.embed_tokens.weight"
    return {
        name: _moved(tensor, group=group, key=f"offgrid/{seed}/{name}")
        if name == head or name.endswith("_proj.weight")
        else tensor
        for name, tensor in state.items()
    }


def _moved(weight_NK: Tensor, *, group: int, key: str) -> Tensor:
    rows, columns = weight_NK.shape
    whole = columns - columns % group
    wide_NK = weight_NK.detach().to("cpu", torch.float32)
    # Philox is counter-based and drawn here by one thread: no dependence on how many there are.
    digest = blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))
    noise_NK = torch.from_numpy(generator.random((rows, columns), dtype=np.float32)).mul_(2).sub_(1)
    step_NK = torch.empty_like(wide_NK)
    for start, stop, size in ((0, whole, group), (whole, columns, columns - whole)):
        if start == stop:
            continue
        groups_NCG = wide_NK[:, start:stop].reshape(rows, -1, size)
        step_NC1 = (groups_NCG.amax(-1, keepdim=True) - groups_NCG.amin(-1, keepdim=True)) / LEVELS
        step_NK[:, start:stop] = step_NC1.expand(-1, -1, size).reshape(rows, -1)
    # Not in place: a float32 weight is its own wide form, and the caller's.
    return (wide_NK + noise_NK.mul_(step_NK).mul_(MOVE_STEPS)).to(weight_NK.dtype)
