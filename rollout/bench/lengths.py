"""How long answers are: a seeded long-tailed law, and a summary of any lengths.

The law decides a drain before anything else does, so every result shows it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_NORMAL = statistics.NormalDist()


def trace_lengths(
    count: int, *, seed: int, median_tokens: float, sigma: float, cap_tokens: int
) -> tuple[int, ...]:
    """Return ``count`` lognormal lengths in 1 .. ``cap_tokens``; ``sigma`` is of the logarithm.

    Same arguments, same lengths, on every machine: no library's generator is involved.
    """
    return tuple(
        min(cap_tokens, max(1, round(median_tokens * math.exp(sigma * _standard_normal(seed, row)))))
        for row in range(count)
    )


def _standard_normal(seed: int, row: int) -> float:
    digest = blake2b(f"bench/length/{seed}/{row}".encode(), digest_size=8).digest()
    return _NORMAL.inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2**64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSummary:
    """New tokens of every row of one workload."""

    lengths: tuple[int, ...]
    """By row."""

    rows_at_cap: int
    mean_tokens: float
    median_tokens: float
    max_tokens: int


def summarize(lengths: Sequence[int], *, cap_tokens: int) -> LengthSummary:
    """Return what ``lengths`` look like."""
    return LengthSummary(
        lengths=tuple(lengths),
        rows_at_cap=sum(n >= cap_tokens for n in lengths),
        mean_tokens=statistics.fmean(lengths),
        median_tokens=statistics.median(lengths),
        max_tokens=max(lengths),
    )
