"""4-bit and 8-bit linears: codes equal the oracle's, outputs stay within the activation error, bits repeat.

Shapes: R rows, N out features, K in features.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drafters.int4.aten import AtenInt4Linear, AtenInt8Linear
from drafters.int4.linears import KERNELS, Kernel, build_linear
from drafters.int4.packed import PackedInt4Linear, PackedInt8Linear, blocks_of, panels_of
from drafters.int4.rounding import NF4_LEVELS, round_to_int4, round_to_int8_rows, round_to_nf4
from drafters.types import DraftError

SHAPES = [(1, 1), (3, 5), (63, 1), (65, 1), (4095, 1), (31, 33), (16, 64), (40, 96)]
GENERIC = ("TAILDRAFT_GENERIC",)
AVX2 = ("TAILDRAFT_AVX2",)
"""What the machine's own build is, unless it has AVX-512."""

BF16_STEP = 2.0**-8
"""Relative width of a bfloat16 step; rounding moves a value by at most half of it."""


@dataclass(kw_only=True)
class Weight:
    """A ``LinearWeight`` of given rows; ``in_panels`` shows it as the compiled engine keeps it."""

    rows_NK: Tensor
    name: str = "layers.0.qkv"
    in_panels: bool = False

    @property
    def out_features(self) -> int:
        return self.rows_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.rows_NK.shape[1]

    def rows(self) -> Tensor:
        return self.rows_NK

    @property
    def panels(self) -> Tensor | None:
        if not self.in_panels:
            return None
        n, k = self.rows_NK.shape
        padded = torch.zeros(panels_of(n) * 16, k, dtype=torch.bfloat16)
        padded[:n] = self.rows_NK.bfloat16()
        return padded.view(-1, 2, 8, k).permute(0, 3, 2, 1).contiguous()


def weight(
    n: int, k: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, panels: bool = False
) -> Weight:
    rows = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    return Weight(rows_NK=rows.to(dtype), in_panels=panels)


def packed4(source: Weight, *, group: int = 32, defines: tuple[str, ...] = ()) -> PackedInt4Linear:
    linear = PackedInt4Linear(
        name=source.name,
        out_features=source.out_features,
        in_features=source.in_features,
        group=group,
        defines=defines,
    )
    linear.rebuild(source)
    return linear


def packed8(source: Weight, *, defines: tuple[str, ...] = ()) -> PackedInt8Linear:
    linear = PackedInt8Linear(
        name=source.name, out_features=source.out_features, in_features=source.in_features, defines=defines
    )
    linear.rebuild(source)
    return linear


def per_block(values_NG: Tensor, *, group: int, in_features: int) -> Tensor:
    return values_NG.repeat_interleave(group // 32, dim=1)[:, : blocks_of(in_features)]


def inputs(rows: int, k: int, *, seed: int = 1) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))


def activation_bound(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """Most the output can move when x moves by half a code of its block of 32; float sums add a little."""
    in_features = x_RK.shape[1]
    padded = torch.nn.functional.pad(x_RK.abs(), (0, -in_features % 32))
    half_code = padded.view(len(x_RK), -1, 32).amax(-1).repeat_interleave(32, 1)[:, :in_features] / 254
    return (half_code + x_RK.abs() * 1e-5) @ weight_NK.abs().T + 1e-6


@pytest.mark.parametrize("defines", [(), AVX2, GENERIC])
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("group", [32, 64, 96])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compiled_int4_codes_and_factors_equal_the_oracles(
    n: int, k: int, group: int, panels: bool, defines: tuple[str, ...]
) -> None:
    source = weight(n, k, panels=panels)
    codes_NK, scale, minimum = packed4(source, group=group, defines=defines).unpack()
    oracle = round_to_int4(source.rows_NK, group)
    assert torch.equal(codes_NK, oracle.codes_NK)
    assert torch.equal(scale, per_block(oracle.scale_NG, group=group, in_features=k))
    assert torch.equal(minimum, per_block(oracle.minimum_NG, group=group, in_features=k))


@pytest.mark.parametrize("defines", [(), AVX2, GENERIC])
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compiled_int8_codes_and_scales_equal_the_oracles(
    n: int, k: int, panels: bool, defines: tuple[str, ...]
) -> None:
    source = weight(n, k, panels=panels)
    codes_NK, scale_N = packed8(source, defines=defines).unpack()
    oracle = round_to_int8_rows(source.rows_NK)
    assert torch.equal(codes_NK, oracle.codes_NK)
    assert torch.equal(scale_N, oracle.scale_N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_an_int4_round_trip_moves_no_element_by_more_than_its_bound(
    n: int, k: int, dtype: torch.dtype
) -> None:
    """A37."""
    rows_NK = weight(n, k, dtype=dtype).rows_NK
    rounded = round_to_int4(rows_NK, 32)
    scale_NK, minimum_NK = (
        t.float().repeat_interleave(32, 1)[:, :k] for t in (rounded.scale_NG, rounded.minimum_NG)
    )
    bound_NK = scale_NK * (0.6 + 15 * BF16_STEP) + minimum_NK.abs() * BF16_STEP + 1e-7
    error_NK = (rounded.dequantize() - rows_NK.float()).abs()
    assert bool((error_NK <= bound_NK).all())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_an_int8_round_trip_moves_no_element_by_more_than_half_a_code(n: int, k: int) -> None:
    rows_NK = weight(n, k).rows_NK
    rounded = round_to_int8_rows(rows_NK)
    error_NK = (rounded.dequantize() - rows_NK.float()).abs()
    assert bool((error_NK <= rounded.scale_N[:, None] * 0.5001).all())


def test_weights_go_to_the_nearest_normal_float_of_their_group() -> None:
    rows_NK = weight(40, 96).rows_NK
    rows_NK[3, :32] = 0
    rounded_NK = round_to_nf4(rows_NK, 32)
    top_NG = rows_NK.float().view(40, 3, 32).abs().amax(-1)
    stands_for = top_NG.repeat_interleave(32, 1)[..., None] * torch.tensor(NF4_LEVELS)
    nearest_NK = (stands_for - rows_NK.float()[..., None]).abs().amin(-1)
    assert torch.allclose((rounded_NK - rows_NK.float()).abs(), nearest_NK, rtol=0, atol=1e-8)
    assert not rounded_NK[3, :32].any()


def test_bitsandbytes_multiplies_by_the_same_normal_floats() -> None:
    pytest.importorskip("bitsandbytes")
    source = weight(48, 96, dtype=torch.float32)
    own_KN = build_linear("nf4", source, bits=4, group=32).apply(torch.eye(96))
    assert torch.allclose(own_KN.T, round_to_nf4(source.rows_NK, 32), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_ten_builds_give_the_same_bytes(n: int, k: int) -> None:
    """A37."""
    source = weight(n, k, panels=True)
    assert len({bytes(packed4(source).packed.tolist()) for _ in range(10)}) == 1
    assert len({tuple(packed8(source).packed.tolist()) for _ in range(10)}) == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compiled_outputs_stay_within_the_activation_error_of_the_oracle(n: int, k: int, rows: int) -> None:
    source, x_RK = weight(n, k), inputs(rows, k)
    for packed, oracle_NK in (
        (packed4(source), round_to_int4(source.rows_NK, 32).dequantize()),
        (packed8(source), round_to_int8_rows(source.rows_NK).dequantize()),
    ):
        error_RN = (packed.apply(x_RK) - x_RK @ oracle_NK.T).abs()
        assert bool((error_RN <= activation_bound(x_RK, oracle_NK)).all())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain_cpp_and_vector_codes_give_the_same_bits(n: int, k: int) -> None:
    source, x_RK = weight(n, k), inputs(7, k)
    x_RK[3] *= 1e20
    x_RK[4] *= 1e-36
    x_RK[5] = 0
    for make in (packed4, packed8):
        own_RN = make(source).apply(x_RK)
        for defines in (AVX2, GENERIC):
            assert torch.equal(own_RN, make(source, defines=defines).apply(x_RK))


def test_a_rows_output_does_not_depend_on_the_rows_beside_it() -> None:
    source, x_RK = weight(40, 96), inputs(13, 96)
    for linear in (packed4(source), packed8(source)):
        together_RN = linear.apply(x_RK)
        assert all(torch.equal(linear.apply(x_RK[i : i + 1])[0], together_RN[i]) for i in range(13))
        assert torch.equal(linear.apply(x_RK.flip(0)).flip(0), together_RN)


def test_thread_count_changes_no_bit() -> None:
    source, x_RK = weight(70, 96), inputs(5, 96)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((packed4(source).packed, packed4(source).apply(x_RK)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e6, -1e6, 1e-40, 1e-31, 3e37])
def test_a_constant_weight_comes_back_as_its_bfloat16_value(value: float) -> None:
    """A38: all zeros and numbers under the smallest normal one, too."""
    source = Weight(rows_NK=torch.full((5, 40), value))
    expected = source.rows_NK.bfloat16().float()
    assert torch.equal(round_to_int4(source.rows_NK, 32).dequantize(), expected)
    codes_NK, scale, minimum = packed4(source).unpack()
    assert not codes_NK.any()
    assert not scale.any()
    assert torch.equal(minimum.float(), expected[:, :2])


@pytest.mark.parametrize("trap", [1e6, -1e6, 1e-40, 9e37, -9e37])
@pytest.mark.parametrize("defines", [(), GENERIC])
def test_a_trap_among_weights_keeps_every_factor_and_output_finite(
    trap: float, defines: tuple[str, ...]
) -> None:
    """A38."""
    source = weight(20, 70, dtype=torch.float32)
    source.rows_NK[7, 33] = trap
    four, eight = packed4(source, defines=defines), packed8(source, defines=defines)
    codes_NK, scale, minimum = four.unpack()
    oracle = round_to_int4(source.rows_NK, 32)
    assert torch.equal(codes_NK, oracle.codes_NK)
    assert torch.equal(eight.unpack()[0], round_to_int8_rows(source.rows_NK).codes_NK)
    assert bool(torch.isfinite(scale).all() and torch.isfinite(minimum).all())
    assert bool(torch.isfinite(oracle.dequantize()).all())
    x_RK = inputs(3, 70) * 0.01
    assert bool(torch.isfinite(four.apply(x_RK)).all() and torch.isfinite(eight.apply(x_RK)).all())


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 2e38])
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("place", [(0, 0), (7, 33), (19, 69)])
def test_a_weight_that_cannot_be_rounded_is_refused_by_name(
    kernel: Kernel, bad: float, panels: bool, place: tuple[int, int]
) -> None:
    """A38."""
    source = weight(20, 70, panels=panels)
    source.rows_NK[place] = bad
    for bits in (4, 8):
        with pytest.raises(DraftError, match=r"build refused: layers\.0\.qkv"):
            build_linear(kernel, source, bits=bits, group=32)


def test_non_finite_activations_reach_the_output_of_their_row_alone() -> None:
    source, x_RK = weight(20, 70), inputs(3, 70)
    clean_RN = packed4(source).apply(x_RK)
    for bad in (float("nan"), float("inf"), float("-inf")):
        poisoned_RK = x_RK.clone()
        poisoned_RK[1, 69] = bad
        for linear in (packed4(source), packed8(source)):
            assert bool(torch.isnan(linear.apply(poisoned_RK)[1]).all())
        assert torch.equal(packed4(source).apply(poisoned_RK)[[0, 2]], clean_RN[[0, 2]])


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("bits", [4, 8])
def test_requantising_keeps_addresses_and_equals_a_fresh_build(kernel: Kernel, bits: int) -> None:
    if kernel == "nf4":
        pytest.importorskip("bitsandbytes")
    old, new = weight(48, 96, seed=0), weight(48, 96, seed=5)
    linear = build_linear(kernel, old, bits=bits, group=32)  # type: ignore[arg-type]

    def buffers(of: object) -> dict[str, Tensor]:
        return {name: value for name, value in vars(of).items() if isinstance(value, Tensor)}

    addresses = {name: t.data_ptr() for name, t in buffers(linear).items()}
    before = {name: t.clone() for name, t in buffers(linear).items()}
    linear.rebuild(new)
    fresh = buffers(build_linear(kernel, new, bits=bits, group=32))  # type: ignore[arg-type]
    assert addresses
    for name, tensor in buffers(linear).items():
        assert tensor.data_ptr() == addresses[name]
        assert torch.equal(tensor, fresh[name])
    assert any(not torch.equal(before[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_torchs_int4_kernel_agrees_with_the_oracle(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    source, x_RK = weight(48, 96, dtype=dtype), inputs(rows, 96).to(dtype)
    for bits in (4, 8):
        aten = build_linear("aten", source, bits=bits, group=32).apply(x_RK)
        oracle = build_linear("torch", source, bits=bits, group=32).apply(x_RK)
        assert aten.dtype == dtype
        assert (aten - oracle).abs().max() <= tolerance * oracle.abs().max()


@pytest.mark.parametrize(
    ("n", "k", "group", "reason"),
    [
        (40, 96, 32, "out features must be a multiple of 16, got 40"),
        (16, 48, 32, "in features must be a multiple of the group 32, got 48"),
        (16, 96, 96, "group must be one of"),
    ],
)
def test_torchs_int4_kernel_refuses_a_shape_it_cannot_take(n: int, k: int, group: int, reason: str) -> None:
    with pytest.raises(DraftError, match=rf"layers\.0\.qkv .*{reason}"):
        AtenInt4Linear(weight(n, k), group=group)


def test_torchs_int8_kernel_refuses_in_features_it_would_read_past() -> None:
    with pytest.raises(DraftError, match=r"layers\.0\.qkv .* multiple of 32, got 33"):
        AtenInt8Linear(weight(17, 33))


def test_panels_of_the_wrong_size_are_refused() -> None:
    class Wrong(Weight):
        @property
        def panels(self) -> Tensor | None:
            return torch.zeros(7, dtype=torch.bfloat16)

    with pytest.raises(DraftError, match="panels hold 7 values"):
        packed4(Wrong(rows_NK=torch.zeros(16, 32)))
    with pytest.raises(ValueError, match="input has 31 features, expected 32"):
        packed4(weight(16, 32)).apply(torch.zeros(1, 31))


def test_weight_bytes_count_what_one_pass_reads() -> None:
    assert packed4(weight(40, 96)).weight_bytes == 3 * 3 * 320
    assert packed8(weight(40, 96)).weight_bytes == 3 * 3 * 512 + 3 * 16 * 4


def test_the_fitted_line_lowers_the_error_by_a_fifth_and_finds_a_noisy_grid_again() -> None:
    noise = torch.Generator().manual_seed(3)
    on_grid = round_to_int4(torch.randn(200, 64, generator=noise), 32)
    step_NK = on_grid.scale_NG.float().repeat_interleave(32, 1)
    off_NK = (torch.rand(200, 64, generator=noise) - 0.5) * 0.5 * step_NK
    weight_NK = (on_grid.dequantize() + off_NK).bfloat16().float()

    grouped = weight_NK.view(200, 2, 32)
    lo, hi = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    between = ((grouped - lo) / (hi - lo) * 15).round() / 15 * (hi - lo) + lo

    def rms(error: Tensor) -> float:
        return float(error.square().mean().sqrt())

    fitted = rms(round_to_int4(weight_NK, 32).dequantize() - weight_NK)
    assert 0.7 < fitted / rms(between - grouped) < 0.85
    # What is left is the noise itself: codes found the grid again.
    assert fitted <= 1.02 * rms(off_NK)
