import ctypes
import itertools
import math

import pytest
import torch

from drafters.kernels import build
from rollout.engine import noise
from rollout.engine.chooser_compiled import SOURCE


def test_the_hash_never_changes_because_recorded_seeds_must_replay() -> None:
    key = noise.noise_key(12345678901234567, 77, 2)
    assert key == 0x2C0723C1EC133FD6
    assert noise.hash32([key], torch.tensor([0, 1, 49151]))[0].tolist() == [
        3966727155,
        1260795887,
        1035286894,
    ]


def test_the_kernel_computes_the_same_hash_and_noise() -> None:
    library = build.load(SOURCE)
    count = 5000
    for seed, position, stream, first in ((0, 0, 0, 0), (2**63 - 1, 131071, 3, 151000), (91, 2**40, 1, 7)):
        hashes = (ctypes.c_uint32 * count)()
        gumbels = (ctypes.c_double * count)()
        library.taildraft_noise(
            ctypes.c_int64(seed),
            ctypes.c_int64(position),
            ctypes.c_int64(stream),
            first,
            count,
            hashes,
            gumbels,
        )
        key = noise.noise_key(seed, position, stream)
        reference = noise.hash32([key], torch.arange(first, first + count))[0]
        assert reference.tolist() == list(hashes)
        worst = (
            (noise.gumbel_of_hash(reference) - torch.tensor(list(gumbels), dtype=torch.float64)).abs().max()
        )
        assert worst < 1e-14


def test_noise_is_finite_and_accurate_at_both_ends() -> None:
    ends = torch.tensor([0, 1, 2**32 - 2, 2**32 - 1])
    values = noise.gumbel_of_hash(ends).tolist()
    for hashed, value in zip(ends.tolist(), values, strict=True):
        u = (hashed + 0.5) / 2**32
        assert value == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-14)
    assert values == sorted(values, reverse=True)
    assert values[0] < noise.MAX_NOISE < values[0] + 0.002


def test_one_key_gives_every_token_another_hash() -> None:
    hashes = noise.hash32([noise.noise_key(3, 5)], torch.arange(200_000))
    assert hashes.unique().numel() == 200_000


def test_keys_of_one_seed_never_meet() -> None:
    keys = {noise.noise_key(9, position, stream) for position in range(2000) for stream in range(4)}
    assert len(keys) == 8000


@pytest.mark.parametrize(("position", "stream"), [(-1, 0), (2**47, 0), (0, 2**16), (0, -1)])
def test_a_key_outside_its_range_is_refused(position: int, stream: int) -> None:
    with pytest.raises(ValueError, match="range"):
        noise.noise_key(0, position, stream)


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert noise.noise_key(-1, 4) == noise.noise_key(2**64 - 1, 4)


def test_rows_and_offsets_do_not_change_the_noise() -> None:
    keys = [noise.noise_key(1, p) for p in range(3)]
    together = noise.gumbel(keys, vocab_size=100)
    assert torch.equal(together[1], noise.gumbel(keys[1:2], vocab_size=100)[0])
    assert torch.equal(together[2, 40:], noise.gumbel(keys[2:], vocab_size=60, first_token=40)[0])


def test_uniforms_lie_strictly_inside_the_unit_interval() -> None:
    values = [noise.uniform(seed, 3) for seed in range(1000)]
    assert 0 < min(values) < 0.01
    assert 0.99 < max(values) < 1


@pytest.mark.parametrize("probs", [(0.5, 0.3, 0.2), (0.9, 0.09, 0.01), (1 / 3, 1 / 3, 1 / 3)])
def test_the_grid_bound_holds_where_the_whole_grid_can_be_counted(probs: tuple[float, ...]) -> None:
    """Five bits instead of 32: all 32^3 noise triples are enumerated, with the same formula."""
    bits = 5
    races = [-math.log1p(-(h + 0.5) / 2**bits) for h in range(2**bits)]
    wins = [0] * len(probs)
    for triple in itertools.product(races, repeat=len(probs)):
        times = [e / p for e, p in zip(triple, probs, strict=True)]
        wins[times.index(min(times))] += 1
    tv = 0.5 * sum(abs(w / 2 ** (3 * bits) - p) for w, p in zip(wins, probs, strict=True))
    assert 0 < tv <= noise.grid_tv_bound(len(probs), bits=bits)


def test_the_grid_costs_less_than_a_sampler_could_notice() -> None:
    assert noise.grid_tv_bound(49152) < 6e-6
    assert noise.grid_tv_bound(151936) < 2e-5
