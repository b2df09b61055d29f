// Linears of a drafter: 4-bit or 8-bit weights times 8-bit activations, accumulated in float.
//
// Weights stand in panels of 16 out features (columns), like the policy's bf16 panels, cut into blocks of
// 32 in features. Activations are rounded per row and block of 32. Inside a block all arithmetic is integer
// and exact; across blocks floats are added in the order of k. So a row's result depends on neither the
// instruction set, nor the rows computed beside it, nor the split of panels over threads.
//
// A block of Int4Weight, 320 bytes: 8 vectors of 8 lanes of 4 bytes, lane c of vector j holding k = 4j..4j+3,
// column c in the low nibbles and column c + 8 in the high ones; then 16 scales and 16 minima in bf16, in the
// slot order of bf16_panels.h. A weight is code * scale + minimum, codes 0..15. A rounding group may span
// several blocks; its scale and minimum are repeated in each.
//
// A block of Int8Weight, 512 bytes: 8 times (columns 0-7, columns 8-15), lanes as above. Codes -127..127, one
// float scale per column.
//
// K is padded to whole blocks and N to whole panels; what stands there yields zeros.
#pragma once
#include "bf16_panels.h"
#include "int_lanes.h"

namespace int4 {

constexpr int kBlock = 32;
constexpr int kColumns = panels::kColumns;
constexpr int kCodeBytes4 = kBlock * kColumns / 2;
constexpr int kBlockBytes4 = kCodeBytes4 + 2 * kColumns * 2;
constexpr int kBlockBytes8 = kBlock * kColumns;

// Rows that share one pass over a panel, and the unpacking of its codes: two accumulators each, beside two
// vectors of codes and one of activations in AVX2's sixteen registers.
constexpr int kMaxRows = 6;

// How far ahead of the first pass weights are fetched: what one core streams in about two memory latencies under
// load. One row of SmolLM2's linears took 2.11 ms with 2048, 2.00 with 4096 and 1.99 with 6144; more rows did not mind.
constexpr int kFetchBytes = 6144;

// Magnitudes under this round to zero: their reciprocal would overflow.
constexpr float kTiny = 1e-30f;

inline int blocks(int k) { return (k + kBlock - 1) / kBlock; }
inline int padded(int k) { return blocks(k) * kBlock; }

// Rows of 8-bit activations: q has padded(k) columns, scale and scaled_sum blocks(k).
struct Activations {
  const int8_t* q;
  const float* scale;
  const float* scaled_sum;  // scale times the sum of the block's codes: what a weight's minimum multiplies
  int k;
};

struct Int4Weight {
  const uint8_t* data;
  int n, k;
};

struct Int8Weight {
  const int8_t* data;
  const float* scale;  // panels::count(n) * 16
  int n, k;
};

inline size_t panel_bytes4(int k) { return static_cast<size_t>(blocks(k)) * kBlockBytes4; }
inline size_t panel_bytes8(int k) { return static_cast<size_t>(blocks(k)) * kBlockBytes8; }

// ---- activations

namespace detail {

// One block of 32 floats. NaN or infinity makes the scale NaN, so that it reaches every output of the row.
inline void quantize_block(const float* x, int8_t* q, float* scale, float* scaled_sum) {
  uint32_t amax_bits = 0;
  int sum = 0;
#ifdef TAILDRAFT_INT_AVX2
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 v[4];
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  }
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  amax_bits = static_cast<uint32_t>(_mm_cvtsi128_si32(t));
#else
  for (int i = 0; i < kBlock; ++i) {
    uint32_t u;
    std::memcpy(&u, x + i, 4);
    u &= 0x7fffffffu;
    amax_bits = u > amax_bits ? u : amax_bits;
  }
#endif
  float amax;
  std::memcpy(&amax, &amax_bits, 4);
  if (!(amax >= kTiny && amax_bits < 0x7f800000u)) {
    std::memset(q, 0, kBlock);
    *scale = *scaled_sum = amax_bits < 0x7f800000u ? 0.0f : std::nanf("");
    return;
  }
  const float inverse = 127.0f / amax;
#ifdef TAILDRAFT_INT_AVX2
  const __m256 by = _mm256_set1_ps(inverse);
  __m256i c[4];
  for (int i = 0; i < 4; ++i) c[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], by));
  // Packing works in 128-bit halves; the permutation puts the eight groups of four back in order.
  __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
  packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), packed);
  __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed), _mm256_set1_epi16(1));
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  sum = _mm_cvtsi128_si32(h);
#else
  for (int i = 0; i < kBlock; ++i) {
    int code = static_cast<int>(std::nearbyint(x[i] * inverse));
    q[i] = static_cast<int8_t>(code);
    sum += code;
  }
#endif
  *scale = amax / 127.0f;
  *scaled_sum = *scale * static_cast<float>(sum);
}

}  // namespace detail

// Round one row of k floats to 8 bits per block: code = round(x * 127 / max |x|). q, scale and scaled_sum have
// the sizes named at Activations; q is zero past k.
inline void quantize_row(const float* x, int k, int8_t* q, float* scale, float* scaled_sum) {
  const int whole = k / kBlock;
  for (int b = 0; b < whole; ++b) detail::quantize_block(x + b * kBlock, q + b * kBlock, scale + b, scaled_sum + b);
  if (whole * kBlock == k) return;
  float rest[kBlock] = {};
  std::memcpy(rest, x + whole * kBlock, static_cast<size_t>(k - whole * kBlock) * sizeof(float));
  detail::quantize_block(rest, q + whole * kBlock, scale + whole, scaled_sum + whole);
}

// ---- dot products of one block, R rows at once: dot[r] lane c is the sum over 32 k of weight code * row code

namespace detail {

#ifdef TAILDRAFT_INT_AVX2

// The four codes at q, in every lane.
inline __m256i spread(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

// Makes the compiler take v as it stands. Left alone it reorders exact sums: all products of a block first,
// and with sixteen registers most of them wait in memory.
inline void pin(__m256i& v) { asm("" : "+v"(v)); }

inline __m256i load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) && !defined(TAILDRAFT_AVX2)
#define TAILDRAFT_INT_VNNI 1
// sum += four products of unsigned and signed bytes per lane, exact in 32 bits.
inline __m256i dot_add(__m256i sum, __m256i u, __m256i s) { return _mm256_dpbusd_epi32(sum, u, s); }
#endif

template <int R>
inline void dot_block(const uint8_t* w, const int8_t* q, int stride, I16 (&dot)[R]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i lo[R], hi[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    __m256i both = load_codes(w + 32 * j);
    __m256i a = _mm256_and_si256(both, nibble);
    __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      __m256i x = spread(q + r * stride + 4 * j);
#ifdef TAILDRAFT_INT_VNNI
      lo[r] = dot_add(lo[r], a, x);
      hi[r] = dot_add(hi[r], b, x);
#else
      // A pair is at most 2 * 15 * 127 = 3810, so eight of them stay within 16 bits.
      lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(a, x));
      hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(b, x));
#endif
      pin(lo[r]);
      pin(hi[r]);
    }
  }
#ifdef TAILDRAFT_INT_VNNI
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) dot[r] = {lo[r], hi[r]};
#else
  const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) dot[r] = {_mm256_madd_epi16(lo[r], one), _mm256_madd_epi16(hi[r], one)};
#endif
}

template <int R>
inline void dot_block(const int8_t* w, const int8_t* q, int stride, I16 (&dot)[R]) {
#ifndef TAILDRAFT_INT_VNNI
  const __m256i one = _mm256_set1_epi16(1);
#endif
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) dot[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    __m256i a = load_codes(w + 64 * j), b = load_codes(w + 64 * j + 32);
    __m256i abs_a = _mm256_abs_epi8(a), abs_b = _mm256_abs_epi8(b);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      __m256i x = spread(q + r * stride + 4 * j);
      // |w| * (x with w's sign): the unsigned operand the instruction wants. Neither factor is ever -128, so
      // a pair is at most 2 * 127 * 127 = 32258 and does not saturate.
      __m256i xa = _mm256_sign_epi8(x, a), xb = _mm256_sign_epi8(x, b);
#ifdef TAILDRAFT_INT_VNNI
      dot[r] = {dot_add(dot[r].lo, abs_a, xa), dot_add(dot[r].hi, abs_b, xb)};
#else
      dot[r].lo = _mm256_add_epi32(dot[r].lo, _mm256_madd_epi16(_mm256_maddubs_epi16(abs_a, xa), one));
      dot[r].hi = _mm256_add_epi32(dot[r].hi, _mm256_madd_epi16(_mm256_maddubs_epi16(abs_b, xb), one));
#endif
      pin(dot[r].lo);
      pin(dot[r].hi);
    }
  }
}

#else

template <int R>
inline void dot_block(const uint8_t* w, const int8_t* q, int stride, I16 (&dot)[R]) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c) {
      int sum = 0;
      for (int k = 0; k < kBlock; ++k) {
        uint8_t both = w[32 * (k / 4) + 4 * (c % 8) + k % 4];
        sum += (c < 8 ? both & 15 : both >> 4) * q[r * stride + k];
      }
      dot[r].v[c] = sum;
    }
}

template <int R>
inline void dot_block(const int8_t* w, const int8_t* q, int stride, I16 (&dot)[R]) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c) {
      int sum = 0;
      for (int k = 0; k < kBlock; ++k) sum += w[64 * (k / 4) + 4 * c + k % 4] * q[r * stride + k];
      dot[r].v[c] = sum;
    }
}

#endif

inline void fetch(const void* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + kFetchBytes + i);
}

// ---- one panel times R rows; not inlined: one copy serves every epilogue

template <int R, bool kFetch>
__attribute__((noinline)) void panel_rows(const Int4Weight& w, int panel, const Activations& x, int row, F16 (&out)[R]) {
  const int nb = blocks(x.k), stride = nb * kBlock;
  const uint8_t* block = w.data + panel * panel_bytes4(w.k);
  const int8_t* q = x.q + static_cast<size_t>(row) * stride;
  const float* scale = x.scale + static_cast<size_t>(row) * nb;
  const float* scaled_sum = x.scaled_sum + static_cast<size_t>(row) * nb;
  F16 y[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) y[r] = simd::zero();
  for (int b = 0; b < nb; ++b, block += kBlockBytes4, q += kBlock) {
    if (kFetch) fetch(block, kBlockBytes4);
    I16 dot[R];
    dot_block<R>(block, q, stride, dot);
    const simd::bf16* factors = reinterpret_cast<const simd::bf16*>(block + kCodeBytes4);
    F16 step = panels::load(factors), minimum = panels::load(factors + kColumns);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      y[r] = simd::fma(to_float(dot[r]), simd::mul(step, simd::splat(scale[r * nb + b])), y[r]);
      y[r] = simd::fma(minimum, simd::splat(scaled_sum[r * nb + b]), y[r]);
    }
  }
  for (int r = 0; r < R; ++r) out[r] = y[r];
}

template <int R, bool kFetch>
__attribute__((noinline)) void panel_rows(const Int8Weight& w, int panel, const Activations& x, int row, F16 (&out)[R]) {
  const int nb = blocks(x.k), stride = nb * kBlock;
  const int8_t* block = w.data + panel * panel_bytes8(w.k);
  const int8_t* q = x.q + static_cast<size_t>(row) * stride;
  const float* scale = x.scale + static_cast<size_t>(row) * nb;
  F16 y[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) y[r] = simd::zero();
  for (int b = 0; b < nb; ++b, block += kBlockBytes8, q += kBlock) {
    if (kFetch) fetch(block, kBlockBytes8);
    I16 dot[R];
    dot_block<R>(block, q, stride, dot);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) y[r] = simd::fma(to_float(dot[r]), simd::splat(scale[r * nb + b]), y[r]);
  }
  const F16 column_scale = simd::load(w.scale + panel * kColumns);
  for (int r = 0; r < R; ++r) out[r] = simd::mul(y[r], column_scale);
}

template <int R, class Weight, class Epilogue>
inline void pass(const Weight& w, int panel, const Activations& x, int row, Epilogue& epi) {
  F16 y[R];
  // Only the first pass streams a panel from memory; later ones find it in cache.
  if (row == 0) panel_rows<R, true>(w, panel, x, row, y);
  else panel_rows<R, false>(w, panel, x, row, y);
  for (int r = 0; r < R; ++r) epi(panel, row + r, y[r]);
}

// `rows` <= R rows starting at `row`.
template <int R, class Weight, class Epilogue>
inline void pass_of(int rows, const Weight& w, int panel, const Activations& x, int row, Epilogue& epi) {
  if (rows == R) return pass<R>(w, panel, x, row, epi);
  if constexpr (R > 1) pass_of<R - 1>(rows, w, panel, x, row, epi);
}

}  // namespace detail

// Panels [panel_begin, panel_end) of x W^T for rows 0..rows-1. Calls epi(panel, row, y): lane c of y is out
// feature 16 * panel + c; lanes past n are zero.
template <class Weight, class Epilogue>
inline void linear(const Weight& w, int panel_begin, int panel_end, const Activations& x, int rows, Epilogue epi) {
  const int passes = (rows + kMaxRows - 1) / kMaxRows;
  for (int panel = panel_begin; panel < panel_end; ++panel)
    for (int i = 0, row = 0; i < passes; ++i) {
      const int height = rows * (i + 1) / passes - row;  // near equal
      detail::pass_of<kMaxRows>(height, w, panel, x, row, epi);
      row += height;
    }
}

}  // namespace int4
