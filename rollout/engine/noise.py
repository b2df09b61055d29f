"""Counter-based noise: a number belongs to (seed, position, stream, token) and to nothing else.

Here: the hash, the float64 reference of Gumbel noise, uniforms for accept decisions. The compiled kernel
(``native/compiled_forward/kernels/noise.h``) computes the same 32-bit hash bit for bit and the same noise in
double precision.
Shapes: R rows, V vocabulary.

**The hash.** ``noise_key`` makes 64 bits of (seed, position, stream)::

    key = mix64(mix64(seed + GOLDEN_64) + (position * 2^16 + stream))

where ``mix64`` is a bijection of 64 bits: shifts 30, 27, 31 and two odd multipliers, the published finaliser
"variant 13" of the 64-bit avalanche family (it flips each output bit with probability 1/2 to within 1% for
every input bit). Hence one seed never repeats a key over its positions and streams. The low and the high half
of the key are ``low`` and ``high``; ``hash32`` mixes the token in::

    x = (token * GOLDEN_32 + low) ^ high;   x ^= x >> 16;   x *= MULTIPLIER_1
    x ^= x >> 15;   x *= MULTIPLIER_2;      x ^= x >> 15              (all modulo 2^32)

with the shifts and multipliers of the published low-bias 32-bit mix (avalanche bias about 0.1%). One half of
the key is added and the other xored, before both rounds, so even two keys that share a half give unrelated
hashes. For one key the map from token to hash is a bijection. ``GOLDEN_*`` are odd integers next to 2^64 and
2^32 over the golden ratio: they spread consecutive inputs evenly before the mixing.

**The noise.** u = (hash + 1/2) / 2^32 and g = -log(-log1p(-u)). 1 - u is (~hash + 1/2) / 2^32, exact in
double precision, so -log1p(-u) = -log(1 - u) keeps its full relative accuracy at both ends and g is always
finite: from -3.130 (hash 2^32 - 1) to 22.874 (hash 0).

**What the finite grid costs.** Take hashes as independent and uniform (the tests look for any sign that they
are not) and hold the noise of all tokens but v. Then v wins if and only if u_v < F = 1 - exp(-p_v T), T being
the smallest -log1p(-u) / p of the others. A continuous u_v does so with probability F, the grid with
round(2^32 F) / 2^32, so the two differ by at most 2^-33, and the winner is otherwise the same. Replacing the
tokens' noise one after the other, the law of the chosen token is within

    TV <= V * 2^-33                                     (``grid_tv_bound``)

of the softmax: 5.7e-6 for V = 49152, 1.8e-5 for V = 151936. The bound is reached only where most tokens have
a probability around 2^-33; elsewhere the roundings average out. Rounding y = s + g in double precision adds
less than 1e-14. Drafts use the same grid, so coupling itself is not affected at all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COUPLED_STREAM = 0
"""Noise of a token at its position, shared by the target and every drafter."""

DRAFT_STREAM = 1
"""Draft sampling in block and token mode, where drafts must not share the target's noise."""

RESIDUAL_STREAM = 2
"""Sampling of the token after the kept drafts (residual or bonus) in block and token mode."""

ACCEPT_STREAM = 3
"""Uniforms of accept decisions in block and token mode."""

GOLDEN_64 = 0x9E3779B97F4A7C15
GOLDEN_32 = 0x9E3779B1
MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0xD35A2D97

MAX_NOISE = 22.875
"""No noise exceeds this: a token further than it below the best candidate cannot win."""

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_STREAM_BITS = 16


def mix64(x: int) -> int:
    """Return 64 well mixed bits; a bijection."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def noise_key(seed: int, position: int, stream: int = COUPLED_STREAM) -> int:
    """Return the 64-bit key of one position's noise.

    ``seed`` counts modulo 2^64; ``position`` is absolute, below 2^47; ``stream`` below 2^16.
    """
    if not (0 <= position < 1 << 47 and 0 <= stream < 1 << _STREAM_BITS):
        raise ValueError(f"position {position} or stream {stream} is outside its range")
    return mix64((mix64((seed + GOLDEN_64) & _MASK_64) + (position << _STREAM_BITS) + stream) & _MASK_64)


def hash32(keys: Sequence[int], token_ids_V: Tensor) -> Tensor:
    """Return the 32-bit hashes of tokens under each key: int64 values in [0, 2^32), shape RV."""
    device = token_ids_V.device
    low_R1 = torch.tensor([k & _MASK_32 for k in keys], dtype=torch.int64, device=device).unsqueeze(1)
    high_R1 = torch.tensor([k >> 32 for k in keys], dtype=torch.int64, device=device).unsqueeze(1)
    # int64 products wrap modulo 2^64, so masking keeps the exact product modulo 2^32.
    x_RV = ((token_ids_V.to(torch.int64).unsqueeze(0) * GOLDEN_32 + low_R1) & _MASK_32) ^ high_R1
    x_RV = ((x_RV ^ (x_RV >> 16)) * MULTIPLIER_1) & _MASK_32
    x_RV = ((x_RV ^ (x_RV >> 15)) * MULTIPLIER_2) & _MASK_32
    return x_RV ^ (x_RV >> 15)


def gumbel_of_hash(hashes: Tensor) -> Tensor:
    """Return the standard Gumbel noise of 32-bit hashes, float64; decreasing in the hash."""
    complement = (_MASK_32 - hashes).to(torch.float64).add_(0.5).mul_(2.0**-32)
    return complement.log_().neg_().log_().neg_()


def gumbel(
    keys: Sequence[int], *, vocab_size: int, device: torch.device | str = "cpu", first_token: int = 0
) -> Tensor:
    """Return the noise of tokens ``first_token ..`` under each key, float64, shape RV."""
    tokens_V = torch.arange(first_token, first_token + vocab_size, device=device)
    return gumbel_of_hash(hash32(keys, tokens_V))


def uniform(seed: int, position: int, stream: int = ACCEPT_STREAM) -> float:
    """Return a number in (0, 1), never an end, on a grid of 2^-52."""
    return ((noise_key(seed, position, stream) >> 12) + 0.5) * 2.0**-52


def grid_tv_bound(vocab_size: int, *, bits: int = 32) -> float:
    """Return the most total variation a ``bits``-bit noise grid can cost one choice (module docstring)."""
    return vocab_size * 2.0 ** -(bits + 1)
