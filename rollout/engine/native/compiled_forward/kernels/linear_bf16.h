// x W^T for bf16 weights in panels and float activations.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, 2, ... from zero. Tiles of rows and panels
// only decide which chains run side by side, so a row's bits depend on nothing but the row and the weights.
#pragma once
#include <cstddef>

#include "bf16_panels.h"

namespace bf16 {

using simd::F16;

struct Weight {
  const simd::bf16* data;
  int n, k;
};

struct Activations {
  const float* x;
  size_t stride;
};

// Rows that share one pass over a panel. A row holds one F16 per panel: two registers of sixteen with AVX2,
// one of thirty-two with AVX-512.
#if defined(__AVX512F__) && !defined(TAILDRAFT_GENERIC) && !defined(TAILDRAFT_AVX2)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 6;
#endif

// Panels side by side when rows are few: enough independent chains to hide the latency of a multiply-add, and
// few enough that weights and chains stay in registers.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

constexpr int kStep = 8;
constexpr int kLine = 64;
constexpr int kStepLines = kStep * panels::kColumns * static_cast<int>(sizeof(simd::bf16)) / kLine;

// How far ahead a single pass fetches, in k. Streams of a tile are fetched at the same distance each.
constexpr int kFetchSteps = 64;

// What a pass over a tile fetches for later: at k, lines first, first + every, ... of the step that lies
// `near` bytes ahead, or `far` bytes from k >= wrap on, where `near` would leave the panel.
struct Fetch {
  ptrdiff_t near, far;
  int wrap, first, every;
};

#define TAILDRAFT_INLINE inline __attribute__((always_inline))

namespace detail {

template <int R, int P>
TAILDRAFT_INLINE void step(const simd::bf16* w, size_t panel, const float* x, size_t stride, F16 (&acc)[R][P]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    F16 weights = panels::load(w + p * panel);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][p] = simd::fma(weights, simd::splat(x[r * stride]), acc[r][p]);
  }
}

template <int P>
TAILDRAFT_INLINE void prefetch(const simd::bf16* w, size_t panel, int k, const Fetch& fetch) {
  const char* ahead = reinterpret_cast<const char*>(w) + (k < fetch.wrap ? fetch.near : fetch.far);
  if constexpr (P > 1) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int line = 0; line < kStepLines; ++line)
        __builtin_prefetch(ahead + p * panel * sizeof(simd::bf16) + line * kLine);
  } else {
    for (int line = fetch.first; line < kStepLines; line += fetch.every) __builtin_prefetch(ahead + line * kLine);
  }
}

// Not inlined: one copy serves every epilogue. Returns through memory, which costs nothing beside the loop.
template <int R, int P>
__attribute__((noinline)) void tile(const simd::bf16* w, int k_count, const float* x, size_t stride,
                                    const Fetch& fetch, F16 (&out)[R][P]) {
  F16 acc[R][P];
  const size_t panel = panels::offset(1, 0, k_count);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = simd::zero();
  int k = 0;
  for (; k + kStep <= k_count; k += kStep) {
    prefetch<P>(w + static_cast<size_t>(k) * panels::kColumns, panel, k, fetch);
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i)
      step<R, P>(w + static_cast<size_t>(k + i) * panels::kColumns, panel, x + k + i, stride, acc);
  }
  for (; k < k_count; ++k) step<R, P>(w + static_cast<size_t>(k) * panels::kColumns, panel, x + k, stride, acc);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) out[r][p] = acc[r][p];
}

template <int R, int P, class Epilogue>
inline void pass(const Weight& w, int panel, const Activations& x, int row, const Fetch& fetch, Epilogue& epi) {
  F16 acc[R][P];
  tile<R, P>(w.data + panels::offset(panel, 0, w.k), w.k, x.x + row * x.stride, x.stride, fetch, acc);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) epi(panel + p, row + r, acc[r][p]);
}

// One panel for `rows` <= R rows starting at `row`.
template <int R, class Epilogue>
inline void pass_of(int rows, const Weight& w, int panel, const Activations& x, int row, const Fetch& fetch,
                    Epilogue& epi) {
  if (rows == R) return pass<R, 1>(w, panel, x, row, fetch, epi);
  if constexpr (R > 1) pass_of<R - 1>(rows, w, panel, x, row, fetch, epi);
}

inline Fetch single_pass(int k, int at_once) {
  const ptrdiff_t step = panels::kColumns * sizeof(simd::bf16);
  const ptrdiff_t near = kFetchSteps * step;
  // Past a panel's end lies the next stream's panel, already read; its successor is at_once panels on.
  return {near, near + (at_once - 1) * k * step, k - kFetchSteps, 0, 1};
}

template <int R, class Epilogue>
inline void few_rows(const Weight& w, int begin, int end, const Activations& x, Epilogue& epi) {
  constexpr int kAtOnce = panels_at_once(R);
  int panel = begin;
  for (const Fetch fetch = single_pass(w.k, kAtOnce); panel + kAtOnce <= end; panel += kAtOnce)
    pass<R, kAtOnce>(w, panel, x, 0, fetch, epi);
  for (const Fetch fetch = single_pass(w.k, 1); panel < end; ++panel) pass<R, 1>(w, panel, x, 0, fetch, epi);
}

template <class Epilogue>
inline void many_rows(const Weight& w, int begin, int end, const Activations& x, int rows, Epilogue& epi) {
  const int passes = (rows + kMaxRows - 1) / kMaxRows;
  const ptrdiff_t panel_bytes = panels::offset(1, 0, w.k) * sizeof(simd::bf16);
  for (int panel = begin; panel < end; ++panel)
    for (int i = 0, row = 0; i < passes; ++i) {
      // Passes of near equal height; together they fetch the next panel once.
      const int height = rows * (i + 1) / passes - row;
      const Fetch fetch = passes == 1 ? single_pass(w.k, 1) : Fetch{panel_bytes, panel_bytes, 0, i, passes};
      pass_of<kMaxRows>(height, w, panel, x, row, fetch, epi);
      row += height;
    }
}

}  // namespace detail

// Panels [panel_begin, panel_end) for rows 0..rows-1. Calls epi(panel, row, y): lane c of y is out feature
// 16 * panel + c; lanes past n are zero. For one row panels come in ascending order.
template <class Epilogue>
inline void linear(const Weight& w, int panel_begin, int panel_end, const Activations& x, int rows, Epilogue epi) {
  switch (rows) {
    case 0: return;
    case 1: return detail::few_rows<1>(w, panel_begin, panel_end, x, epi);
    case 2: return detail::few_rows<2>(w, panel_begin, panel_end, x, epi);
    case 3: return detail::few_rows<3>(w, panel_begin, panel_end, x, epi);
    default: return detail::many_rows(w, panel_begin, panel_end, x, rows, epi);
  }
}

}  // namespace bf16
