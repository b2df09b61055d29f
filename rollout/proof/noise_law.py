"""The coupled noise as a source of randomness: uniform, independent, and right in its extreme tail.

Every check states its odds of a false alarm. Chi-square statistics with k degrees of freedom are held to
k + 2 sqrt(14 k) + 28, which a fair source exceeds with probability below e^-14 = 8e-7 (Laurent and Massart's
bound, for every k). Counts of rare events are held to the exact Poisson tail. The noise is a fixed function,
so a verdict never flickers: the odds are those of rejecting a perfect source.

Shapes: K keys, V tokens, N samples.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import Chooser, TargetRow
from rollout.proof.finding import Finding
from rollout.types import SamplingParams

HashOf = Callable[[Sequence[int], Tensor], Tensor]
"""Hashes of tokens under keys, as ``noise.hash32``: what is on trial."""

KeyOf = Callable[[int, int], int]
"""The key of (seed, position), as ``noise.noise_key``."""

FALSE_ALARM = 1e-6
"""Bound on the odds that any single check below rejects a perfect source."""

TOKENS = 4096
POSITIONS = 128
SEEDS = 8
"""4.2 million hashes, 8192 pairs in each of 256 cells: 1% off everywhere, or 14% in one cell, is rejected."""

BINS = 16
TAILS = (2.0**-8, 2.0**-14, 2.0**-18)
"""Shares of the largest noise that are counted; the rarest is expected 16 times, so its absence shows."""


def chi_square_limit(freedom: int) -> float:
    """Return what a chi-square of a fair source exceeds with probability below 8e-7."""
    return freedom + 2 * math.sqrt(14 * freedom) + 28


def noise_findings(
    *, hash_of: HashOf = noise.hash32, key_of: KeyOf = noise.noise_key, chooser: Chooser | None = None
) -> list[Finding]:
    """Return the verdicts on a noise source; the engine's own by default."""
    hashes = torch.stack(
        [
            hash_of([key_of(s, t) for t in range(100, 100 + POSITIONS)], torch.arange(TOKENS))
            for s in range(SEEDS)
        ]
    )
    uniform_STV = (hashes.to(torch.float64) + 0.5) * 2.0**-32
    return [_uniform(uniform_STV), *_independent(uniform_STV), *_tail(uniform_STV), _choices(chooser)]


def _finding(name: str, passed: bool, detail: str, compared: int) -> Finding:
    return Finding(
        part="coupled",
        name=f"noise, {name}",
        passed=passed,
        detail=f"{detail}, false alarm < 1e-6",
        compared=compared,
    )


def _chi_square(name: str, counts: Tensor, expected: float) -> Finding:
    statistic = float(((counts.to(torch.float64) - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    limit = chi_square_limit(freedom)
    total = int(counts.sum())
    return _finding(name, statistic <= limit, f"chi-square {statistic:.0f}, limit {limit:.0f}", total)


def _uniform(uniform_STV: Tensor) -> Finding:
    cells = (uniform_STV.flatten() * 4096).long()
    counts = torch.bincount(cells, minlength=4096)
    return _chi_square("uniform", counts, cells.numel() / 4096)


def _independent(uniform_STV: Tensor) -> list[Finding]:
    """Pairs along each axis, and along two at once, must fill the unit square evenly; no value is in two."""
    u = uniform_STV
    apart = u.reshape(SEEDS, POSITIONS, -1, 2, 64)
    pairs = {
        "neighbouring positions": (u[:, 0::2], u[:, 1::2]),
        "neighbouring tokens": (u[:, :, 0::2], u[:, :, 1::2]),
        "tokens 64 apart": (apart[..., 0, :], apart[..., 1, :]),
        "neighbouring seeds": (u[0::2], u[1::2]),
        "position up, token down": (u[:, 0::2, 1:], u[:, 1::2, :-1]),
        "seed up, position down": (u[0::2, 1:], u[1::2, :-1]),
    }
    return [_pair(f"independent, {name}", first, second) for name, (first, second) in pairs.items()]


def _pair(name: str, first: Tensor, second: Tensor) -> Finding:
    cells = ((first * BINS).long() * BINS + (second * BINS).long()).flatten()
    counts = torch.bincount(cells, minlength=BINS * BINS)
    return _chi_square(name, counts, cells.numel() / BINS**2)


def _tail(uniform_STV: Tensor) -> list[Finding]:
    """Count the largest noise (the smallest hashes): too many or too few, all in one place or not."""
    total = uniform_STV.numel()
    findings = []
    for share in TAILS:
        hits_STV = uniform_STV < share
        seen, mean = int(hits_STV.sum()), total * share
        odds = poisson_two_sided(seen, mean)
        # Tokens or positions with more than their part of the tail: the fullest line of each axis.
        crowd = max(int(hits_STV.sum(dim=(0, 1)).max()), 0)
        crowd_odds = TOKENS * poisson_upper(crowd, mean / TOKENS)
        findings.append(
            _finding(
                f"extreme tail 2^{int(math.log2(share))}",
                odds > FALSE_ALARM / 2 and crowd_odds > FALSE_ALARM / 2,
                f"{seen} of {total} (expected {mean:.1f}), at most {crowd} for one token",
                total,
            )
        )
    return findings


def poisson_upper(count: int, mean: float) -> float:
    """Return the probability of at least ``count`` events."""
    if count <= 0:
        return 1.0
    return float(torch.special.gammainc(torch.tensor(float(count)).double(), torch.tensor(mean).double()))


def poisson_two_sided(count: int, mean: float) -> float:
    """Return twice the smaller tail, both with ``count`` included."""
    lower = 1.0 - poisson_upper(count + 1, mean)
    return min(1.0, 2.0 * min(lower, poisson_upper(count, mean)))


def _choices(chooser: Chooser | None) -> Finding:
    """Choose by noise and compare with the softmax, rare tokens included."""
    count = 20_000
    logits_V = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 2.0, -4.5])
    rows = [TargetRow(seed=s, position=9 + s % 7, params=SamplingParams()) for s in range(count)]
    chosen = (chooser or TorchChooser()).choose(logits_V.expand(count, -1).contiguous(), rows, logprobs=False)
    expected_V = logits_V.double().softmax(-1) * count
    counts_V = torch.bincount(torch.tensor([c.token for c in chosen]), minlength=8)
    statistic = float(((counts_V - expected_V) ** 2 / expected_V).sum())
    limit = chi_square_limit(7)
    return _finding(
        "choices follow the softmax",
        statistic <= limit,
        f"chi-square {statistic:.1f}, limit {limit:.1f}",
        count,
    )
