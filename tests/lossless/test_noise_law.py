"""The noise as a source of randomness. Every bound states its odds of a false alarm, at most 1e-6.

Normal statistics use 5 standard deviations two-sided (6e-7, at least 1e5 terms each). Chi-square and G
statistics with k degrees of freedom use k + 2 sqrt(14 k) + 28, exceeded with probability below e^-14 = 8e-7
(Laurent and Massart's bound, which holds for every k). Seeds are fixed, so a result never flickers.
"""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import TargetRow
from rollout.engine.verify import NoiseDecisions, verify_block
from rollout.seeds import round_seed
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

SIGMAS = 5.0
VOCAB = 49152


def chi_square_limit(freedom: int) -> float:
    return freedom + 2 * math.sqrt(14 * freedom) + 28


def uniforms(keys: list[int], vocab_size: int = VOCAB) -> Tensor:
    return (noise.hash32(keys, torch.arange(vocab_size)).to(torch.float64) + 0.5) / 2**32


def sigmas_of_correlation(a: Tensor, b: Tensor) -> float:
    product = (a - 0.5).flatten() * (b - 0.5).flatten() * 12
    return abs(float(product.mean())) * math.sqrt(product.numel())


def g_statistic(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= {cell for cell, p in law.items() if p > 0}
    return 2 * sum(n * math.log(n / (total * law[cell])) for cell, n in counts.items())


def test_hashes_are_uniform_over_tokens_positions_and_seeds() -> None:
    keys = [noise.noise_key(seed, position) for seed in range(5) for position in range(8)]
    counts = torch.histc(uniforms(keys), bins=4096, min=0, max=1)
    expected = len(keys) * VOCAB / 4096
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(4095)


def test_one_token_is_uniform_over_positions_and_over_seeds() -> None:
    token = torch.tensor([17])
    for keys in (
        [noise.noise_key(3, position) for position in range(60_000)],
        [noise.noise_key(seed, 3) for seed in range(60_000)],
    ):
        u = (noise.hash32(keys, token).to(torch.float64) + 0.5) / 2**32
        counts = torch.histc(u, bins=256, min=0, max=1)
        expected = len(keys) / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(255)


def test_every_bit_is_fair() -> None:
    hashes = noise.hash32([noise.noise_key(1, p) for p in range(8)], torch.arange(VOCAB))
    for bit in range(32):
        ones = float(((hashes >> bit) & 1).to(torch.float64).mean())
        assert abs(ones - 0.5) * 2 * math.sqrt(hashes.numel()) < SIGMAS


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 64, 1024])
def test_tokens_are_independent_of_their_neighbours(distance: int) -> None:
    u = uniforms([noise.noise_key(5, p) for p in range(20)])
    assert sigmas_of_correlation(u[:, distance:], u[:, :-distance]) < SIGMAS


def test_positions_seeds_and_streams_are_independent() -> None:
    positions = range(20)
    base = uniforms([noise.noise_key(5, p) for p in positions])
    others = {
        "position": [noise.noise_key(5, p + 1) for p in positions],
        "seed": [noise.noise_key(6, p) for p in positions],
        "far seed": [noise.noise_key(5 + 2**62, p) for p in positions],
        "stream": [noise.noise_key(5, p, 1) for p in positions],
        "position and seed": [noise.noise_key(4, p + 1) for p in positions],
    }
    for what, keys in others.items():
        assert sigmas_of_correlation(base, uniforms(keys)) < SIGMAS, what


def test_pairs_of_neighbours_fill_the_square_evenly() -> None:
    """Correlation sees only straight lines; cells of the unit square see any pattern 64 wide."""
    u = uniforms([noise.noise_key(11, p) for p in range(20)])
    for first, second in ((u[:, :-1:2], u[:, 1::2]), (u[:-1:2], u[1::2])):
        cells = ((first * 64).long() * 64 + (second * 64).long()).flatten()
        counts = torch.bincount(cells, minlength=4096).to(torch.float64)
        expected = cells.numel() / 4096
        assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(4095)


@pytest.mark.parametrize("half", ["low", "high"])
def test_keys_that_share_a_half_are_still_independent(half: str) -> None:
    base = noise.noise_key(1, 1)
    keep = 0xFFFFFFFF if half == "low" else 0xFFFFFFFF << 32
    a = uniforms([base])
    for other in range(1, 40):
        related = (base & keep) | (noise.mix64(other) & ~keep & (2**64 - 1))
        flipped = base ^ (1 << (other % 32 + (32 if half == "low" else 0)))
        assert sigmas_of_correlation(a, uniforms([related])) < SIGMAS + 0.6  # 78 looks in this test
        assert sigmas_of_correlation(a, uniforms([flipped])) < SIGMAS + 0.6


def test_the_extreme_tail_is_as_heavy_as_it_should_be() -> None:
    """Gumbel noise decides by its largest values: P(g > x) = 1 - exp(-e^-x)."""
    count = 0
    exceeded = dict.fromkeys((4.0, 7.0, 10.0), 0)
    for start in range(0, 160, 16):
        values = noise.gumbel([noise.noise_key(21, p) for p in range(start, start + 16)], vocab_size=VOCAB)
        count += values.numel()
        for level in exceeded:
            exceeded[level] += int((values > level).sum())
    for level, seen in exceeded.items():
        mean = -math.expm1(-math.exp(-level)) * count
        assert abs(seen - mean) < SIGMAS * math.sqrt(mean) + 3, level  # 3: the Poisson's skew at mean 357


def test_the_mean_and_spread_are_gumbels() -> None:
    values = noise.gumbel([noise.noise_key(22, p) for p in range(20)], vocab_size=VOCAB)
    n = values.numel()
    spread = math.pi / math.sqrt(6)
    assert abs(float(values.mean()) - 0.5772156649) < SIGMAS * spread / math.sqrt(n)
    # The fourth central moment of the Gumbel law is 5.4 times the squared variance.
    assert abs(float(values.var()) - spread**2) < SIGMAS * spread**2 * math.sqrt(4.4 / n)


def test_choosing_by_noise_follows_the_softmax_jointly_over_two_positions() -> None:
    logits_V = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 2.0, 0.1], dtype=torch.float64)
    probs = logits_V.softmax(-1).tolist()
    seeds = range(150_000)
    picks = [
        (logits_V + noise.gumbel([noise.noise_key(s, position) for s in seeds], vocab_size=8)).argmax(-1)
        for position in (40, 41)
    ]
    counts = Counter(zip(*(p.tolist() for p in picks), strict=True))
    law = {(a, b): probs[a] * probs[b] for a in range(8) for b in range(8)}
    assert g_statistic(counts, law) < chi_square_limit(63)


@pytest.mark.parametrize("name", ["torch", "compiled"])
def test_choosers_draw_from_the_filtered_distribution(name: str) -> None:
    chooser = TorchChooser() if name == "torch" else CompiledChooser(threads=1)
    params = SamplingParams(temperature=0.8, top_k=6, top_p=0.95)
    logits_V = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 2.0, 0.1])
    rows = [TargetRow(seed=s, position=9, params=params) for s in range(30_000)]
    choices = chooser.choose(logits_V.expand(len(rows), -1).contiguous(), rows, logprobs=False)
    probs = TorchChooser().probs(logits_V.unsqueeze(0), rows[:1])[0].tolist()
    law = {(token,): p for token, p in enumerate(probs) if p > 0}
    assert g_statistic(Counter((c.token,) for c in choices), law) < chi_square_limit(len(law) - 1)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_coupled_acceptance_is_what_theory_says_and_above_its_bound(spread: float) -> None:
    """Two softmaxes under one noise agree on v with probability 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    generator = torch.Generator().manual_seed(3)
    target_V = torch.randn(12, generator=generator, dtype=torch.float64) * 1.5
    draft_V = target_V + spread * torch.randn(12, generator=generator, dtype=torch.float64)
    p, q = target_V.softmax(-1), draft_V.softmax(-1)
    ratios = torch.maximum(p.unsqueeze(0) / p.unsqueeze(1), q.unsqueeze(0) / q.unsqueeze(1))
    exact = float((1 / ratios.sum(-1)).sum())
    tv = float((p - q).abs().sum() / 2)
    assert (1 - tv) / (1 + tv) <= exact <= 1 - tv
    noise_RV = noise.gumbel([noise.noise_key(s, 5) for s in range(100_000)], vocab_size=12)
    agreed = ((target_V + noise_RV).argmax(-1) == (draft_V + noise_RV).argmax(-1)).to(torch.float64).mean()
    assert abs(float(agreed) - exact) < SIGMAS * math.sqrt(exact * (1 - exact) / 100_000)


TARGET_V = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT_V = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


def block_outputs(*, fresh: bool, samples: int) -> Counter[tuple[int, ...]]:
    """Two tokens per sample by block verification with gamma 2 and real noise, laws without memory.

    Without ``fresh``, noise belongs to the position alone and returns when a rejected position is redrawn.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for sample in range(samples):
        output: tuple[int, ...] = ()
        rounds = 0
        while len(output) < 2:
            seed = round_seed(sample, rounds) if fresh else sample
            keys = [noise.noise_key(seed, len(output) + slot, noise.DRAFT_STREAM) for slot in range(2)]
            drafts: list[int] = (DRAFT_V.log() + noise.gumbel(keys, vocab_size=2)).argmax(-1).tolist()
            decisions = NoiseDecisions(seed=seed, position=len(output))
            verdict = verify_block(drafts, TARGET_V.expand(3, -1), DRAFT_V.expand(2, -1), decisions)
            output += tuple(token for token, _ in verdict.tokens)
            rounds += 1
        counts[output[:2]] += 1
    return counts


@pytest.mark.parametrize("fresh", [True, False])
def test_block_verification_follows_ar_with_noise_of_the_round_and_not_with_noise_of_the_position(
    fresh: bool,
) -> None:
    """A rejected draft and its uniforms were looked at: drawing them again is a planted error here."""
    law = {(a, b): float(TARGET_V[a] * TARGET_V[b]) for a in range(2) for b in range(2)}
    statistic = g_statistic(block_outputs(fresh=fresh, samples=2500), law)
    assert (statistic < chi_square_limit(3)) == fresh, statistic
