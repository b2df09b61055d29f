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

// A cache line of weights, in k.
constexpr int kLine = 64 / (panels::kColumns * static_cast<int>(sizeof(simd::bf16)));

// How far ahead of its use a weight is fetched, in k.
constexpr int kFetchSteps = 64;

#define TAILDRAFT_INLINE inline __attribute__((always_inline))

namespace detail {

// One k of a tile: weights at w[panel] + i * 16, activations at x[row] + i.
template <int R, int P>
TAILDRAFT_INLINE void step(const simd::bf16* const (&w)[P], const float* const (&x)[R], int i, F16 (&acc)[R][P]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const F16 weights = panels::load(w[p] + i * panels::kColumns);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) simd::add_product(acc[r][p], weights, simd::splat(x[r][i]));
  }
}

// Fetches the line that stands `ahead` of w[panel] + i * 16.
template <int P>
TAILDRAFT_INLINE void prefetch(const simd::bf16* const (&w)[P], int i, size_t ahead) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) __builtin_prefetch(w[p] + ahead + i * panels::kColumns);
}

// Keeps the compiler from knowing how pointers are apart. It would keep each distance that it meets in a step, and
// these are more than there are registers.
template <class T, int N>
TAILDRAFT_INLINE void apart(const T* (&p)[N]) {
#pragma GCC unroll 12
  for (int i = 0; i < N; ++i) asm("" : "+r"(p[i]));
}

template <class T, int N>
TAILDRAFT_INLINE void advance(const T* (&p)[N], int by) {
#pragma GCC unroll 12
  for (int i = 0; i < N; ++i) p[i] += by;
}

// Not inlined: one copy serves every epilogue. Returns through memory, which costs nothing beside the loop.
template <int R, int P>
__attribute__((noinline)) void tile(const simd::bf16* weights, int k_count, const float* x, size_t stride,
                                    F16 (&out)[R][P]) {
  F16 acc[R][P];
  const simd::bf16* w[P];
  const float* rows[R];
  const size_t panel = panels::offset(1, 0, k_count);
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) w[p] = weights + p * panel;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) rows[r] = x + r * stride;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = simd::zero();
  // Behind a panel stands the next one: where several are read side by side, a neighbour, read already; its own next
  // is P on.
  const size_t near = kFetchSteps * panels::kColumns, far = near + (P - 1) * panel;
  int k = 0;
  for (; k + kStep <= k_count; k += kStep) {
    apart(w), apart(rows);
    const size_t ahead = P == 1 || k + kFetchSteps < k_count ? near : far;
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) {
      if (i % kLine == 0) {
        asm volatile("");  // or fetches all go to the beginning
        prefetch(w, i, ahead);
      }
      step<R, P>(w, rows, i, acc);
    }
    advance(w, kStep * panels::kColumns), advance(rows, kStep);
  }
  for (int i = 0; k + i < k_count; ++i) step<R, P>(w, rows, i, acc);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) out[r][p] = acc[r][p];
}

template <int R, int P, class Epilogue>
inline void pass(const Weight& w, int panel, const Activations& x, int row, Epilogue& epi) {
  F16 acc[R][P];
  tile<R, P>(w.data + panels::offset(panel, 0, w.k), w.k, x.x + row * x.stride, x.stride, acc);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) epi(panel + p, row + r, acc[r][p]);
}

// One panel for `rows` <= R rows starting at `row`.
template <int R, class Epilogue>
inline void pass_of(int rows, const Weight& w, int panel, const Activations& x, int row, Epilogue& epi) {
  if (rows == R) return pass<R, 1>(w, panel, x, row, epi);
  if constexpr (R > 1) pass_of<R - 1>(rows, w, panel, x, row, epi);
}

template <int R, class Epilogue>
inline void few_rows(const Weight& w, int begin, int end, const Activations& x, Epilogue& epi) {
  constexpr int kAtOnce = panels_at_once(R);
  int panel = begin;
  for (; panel + kAtOnce <= end; panel += kAtOnce) pass<R, kAtOnce>(w, panel, x, 0, epi);
  for (; panel < end; ++panel) pass<R, 1>(w, panel, x, 0, epi);
}

// Passes of near equal height over each panel. The first reads it from memory, the others find it in a cache.
template <class Epilogue>
inline void many_rows(const Weight& w, int begin, int end, const Activations& x, int rows, Epilogue& epi) {
  const int passes = (rows + kMaxRows - 1) / kMaxRows;
  for (int panel = begin; panel < end; ++panel)
    for (int i = 0, row = 0; i < passes; ++i) {
      const int height = rows * (i + 1) / passes - row;
      pass_of<kMaxRows>(height, w, panel, x, row, epi);
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
