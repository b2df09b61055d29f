"""The vector type and what is built on it: right to the last place, and the same bits on every back end.

Shapes: N numbers or out features, K in features.
"""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from drafters.kernels.build import KernelBuildError, build

Floats = npt.NDArray[np.float32]

SOURCE = """
#include "bf16_panels.h"
#include "vecmath.h"

#define EACH(name, expr)                                                        \\
  extern "C" void name(const float* in, float* out, int n) {                    \\
    for (int i = 0; i < n; i += 16) {                                           \\
      simd::F16 x = simd::load(in + i);                                         \\
      simd::store(out + i, expr);                                               \\
    }                                                                           \\
  }
EACH(vector_exp, vecmath::exp(x))
EACH(vector_log, vecmath::log(x))
EACH(lane_sum, simd::splat(simd::sum(x)))
EACH(lane_max, simd::splat(simd::max_lane(x)))
EACH(mixed, simd::where_less(x, simd::splat(0.5f), simd::fma(x, x, simd::div(x, simd::splat(3.0f))),
                             simd::sub(simd::max(x, simd::splat(1.0f)), simd::min(x, simd::splat(2.0f)))))

// Sums of products of a number with itself and its neighbours, one after the other in the sum's own place.
extern "C" void products(const float* in, float* out, int n) {
  simd::F16 sum = simd::zero();
  for (int i = 0; i < n; i += 16) {
    for (int j = 0; j < 16; ++j) simd::add_product(sum, simd::load(in + i), simd::splat(in[i + j]));
    simd::store(out + i, sum);
  }
}

extern "C" void round_trip(const float* in, uint16_t* out, int n) {
  for (int i = 0; i < n; i += 16) simd::store_bf16(out + i, simd::load(in + i));
}
extern "C" void pack(const uint16_t* rows, int n, int k, uint16_t* out) { panels::pack(rows, n, k, out); }
extern "C" void unpack(const uint16_t* in, int n, int k, uint16_t* rows) { panels::unpack(in, n, k, rows); }
extern "C" void panel_row(const uint16_t* in, int panel, int i, int k, float* out) {
  simd::store(out, panels::load(in + panels::offset(panel, i, k)));
}
"""

BACK_ENDS: dict[str, tuple[str, ...]] = {
    "native": (),
    "avx2": ("TAILDRAFT_AVX2",),
    "generic": ("TAILDRAFT_GENERIC",),
}
"""The second is the first again on a machine without AVX-512."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    source = tmp_path_factory.mktemp("simd") / "simd_test.cpp"
    source.write_text(SOURCE)
    try:
        return {name: ctypes.CDLL(str(build(source, defines=d))) for name, d in BACK_ENDS.items()}
    except KernelBuildError as error:
        pytest.skip(f"no compiled kernels here: {error}")


def run(library: ctypes.CDLL, function: str, x_N: Floats) -> Floats:
    padded_N = np.resize(x_N, -(-len(x_N) // 16) * 16).astype(np.float32)
    out_N = np.empty_like(padded_N)
    getattr(library, function)(
        padded_N.ctypes.data_as(ctypes.c_void_p), out_N.ctypes.data_as(ctypes.c_void_p), len(padded_N)
    )
    return out_N[: len(x_N)]


def units_in_the_last_place(got_N: Floats, exact_N: npt.NDArray[np.float64]) -> float:
    spacing_N = np.spacing(np.abs(exact_N).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got_N - exact_N) / spacing_N))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_exp_is_within_two_units_over_its_whole_range(
    libraries: dict[str, ctypes.CDLL], back_end: str
) -> None:
    x_N = np.linspace(-87.0, 88.0, 400_001, dtype=np.float32)
    got_N = run(libraries[back_end], "vector_exp", x_N)
    assert units_in_the_last_place(got_N, np.exp(x_N.astype(np.float64))) < 2.0


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_exp_flushes_saturates_and_keeps_nan(libraries: dict[str, ctypes.CDLL], back_end: str) -> None:
    x_N = np.array([-np.inf, -1e30, -87.01, 0.0, -0.0, 88.5, 1e30, np.inf, np.nan], dtype=np.float32)
    got_N = run(libraries[back_end], "vector_exp", x_N)
    assert got_N[:5].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert got_N[5] == got_N[6] == pytest.approx(np.exp(88.0), rel=1e-6)
    assert got_N[7] == np.inf
    assert np.isnan(got_N[8])


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_log_is_within_two_units_near_one_and_far_away(
    libraries: dict[str, ctypes.CDLL], back_end: str
) -> None:
    near_N = np.linspace(0.4, 2.5, 200_001, dtype=np.float32)
    far_N = np.exp(np.linspace(-87.0, 88.0, 200_001)).astype(np.float32)
    for x_N in (near_N, far_N):
        got_N = run(libraries[back_end], "vector_log", x_N)
        exact_N = np.log(x_N.astype(np.float64))
        zero_N = exact_N == 0.0
        assert not got_N[zero_N].any()
        assert units_in_the_last_place(got_N[~zero_N], exact_N[~zero_N]) < 2.0


@pytest.mark.parametrize(
    "function", ["vector_exp", "vector_log", "lane_sum", "lane_max", "mixed", "products"]
)
def test_back_ends_agree_bit_for_bit(libraries: dict[str, ctypes.CDLL], function: str) -> None:
    x_N = np.random.default_rng(0).normal(size=64_000).astype(np.float32)
    x_N = np.abs(x_N) if function == "vector_log" else x_N * 10
    native_N, *others = (run(libraries[name], function, x_N) for name in BACK_ENDS)
    for other_N in others:
        assert np.array_equal(native_N.view(np.uint32), other_N.view(np.uint32))


def test_a_product_is_added_with_one_rounding(libraries: dict[str, ctypes.CDLL]) -> None:
    x_N = np.zeros(16, dtype=np.float32)
    x_N[:2] = 1.0 + 2.0**-12, -1.0 - 2.0**-12
    # The square's last bit is rounded off, and comes to light when the exact square is taken from it.
    for library in libraries.values():
        assert run(library, "products", x_N)[0] == -(2.0**-24)


def test_lanes_are_summed_by_folding_halves(libraries: dict[str, ctypes.CDLL]) -> None:
    x_N = np.random.default_rng(1).normal(size=16).astype(np.float32)
    folded_N = x_N.copy()
    for half in (8, 4, 2, 1):
        folded_N = folded_N[:half] + folded_N[half : 2 * half]
    for library in libraries.values():
        assert run(library, "lane_sum", x_N)[0] == folded_N[0]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_bf16_rounds_as_torch_does(libraries: dict[str, ctypes.CDLL], back_end: str) -> None:
    bits_N = np.random.default_rng(2).integers(0, 2**32, size=160_000, dtype=np.uint64).astype(np.uint32)
    x_N = bits_N.view(np.float32)
    x_N = x_N[~np.isnan(x_N)]
    x_N = np.append(x_N[: len(x_N) // 16 * 16 - 16], np.resize([np.inf, -np.inf, 0.0, -0.0, 3.4e38], 16))
    x_N = x_N.astype(np.float32)
    out_N = np.empty(len(x_N), dtype=np.int16)
    libraries[back_end].round_trip(
        x_N.ctypes.data_as(ctypes.c_void_p), out_N.ctypes.data_as(ctypes.c_void_p), len(x_N)
    )
    assert np.array_equal(out_N, torch.from_numpy(x_N).bfloat16().view(torch.int16).numpy())


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (11, 40), (200, 33), (48, 1)])
def test_panels_hold_every_weight_once_and_zeros_beside_them(
    libraries: dict[str, ctypes.CDLL], back_end: str, n: int, k: int
) -> None:
    library = libraries[back_end]
    weight_NK = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()
    packed = torch.full((-(-n // 16) * 16 * k,), 7.0, dtype=torch.bfloat16)
    library.pack(ctypes.c_void_p(weight_NK.data_ptr()), n, k, ctypes.c_void_p(packed.data_ptr()))
    back_NK = torch.empty_like(weight_NK)
    library.unpack(ctypes.c_void_p(packed.data_ptr()), n, k, ctypes.c_void_p(back_NK.data_ptr()))
    assert torch.equal(back_NK, weight_NK)
    assert packed.count_nonzero() == weight_NK.count_nonzero()
    row = torch.empty(16)
    for i in {0, k - 1}:
        library.panel_row(ctypes.c_void_p(packed.data_ptr()), 0, i, k, ctypes.c_void_p(row.data_ptr()))
        columns = min(n, 16)
        assert torch.equal(row[:columns], weight_NK[:columns, i].float())


def test_a_changed_header_is_another_build(tmp_path: Path) -> None:
    source, header = tmp_path / "one.cpp", tmp_path / "one.h"
    source.write_text('#include "one.h"\nextern "C" int one() { return kOne; }\n')
    answers = []
    for value in (1, 2):
        header.write_text(f"#pragma once\nconstexpr int kOne = {value};\n")
        try:
            answers.append(ctypes.CDLL(str(build(source))).one())
        except KernelBuildError as error:
            pytest.skip(f"no compiled kernels here: {error}")
    assert answers == [1, 2]
