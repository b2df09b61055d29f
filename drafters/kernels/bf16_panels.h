// How the compiled engine keeps bf16 weights: panels of 16 out features, k running inside a panel.
//
// Element (k, column c) of panel p stands at ((p*K + k)*16 + slot(c)). Columns c and c+8 are neighbours, so
// AVX2 widens sixteen of them with one shift and one mask. N is padded to whole panels with zeros.
#pragma once
#include "simd.h"

namespace panels {

constexpr int kColumns = 16;

inline int count(int n) { return (n + kColumns - 1) / kColumns; }
inline int slot(int column) { return column < 8 ? 2 * column : 2 * (column - 8) + 1; }
inline size_t offset(int panel, int k, int in_features) {
  return (static_cast<size_t>(panel) * in_features + k) * kColumns;
}

// The sixteen weights at p, lane c holding column c.
inline simd::F16 load(const simd::bf16* p) {
#if defined(__AVX512F__) && !defined(TAILDRAFT_GENERIC) && !defined(TAILDRAFT_AVX2)
  __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m512i lo = _mm512_castsi256_si512(_mm256_slli_epi32(w, 16));
  __m256i hi = _mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm512_castsi512_ps(_mm512_inserti64x4(lo, hi, 1))};
#elif defined(__AVX2__) && defined(__FMA__) && !defined(TAILDRAFT_GENERIC)
  __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  asm("" : "+x"(w));  // or it is loaded once for each half
  __m256i hi = _mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(hi)};
#else
  simd::F16 r;
  for (int c = 0; c < kColumns; ++c) r.v[c] = simd::bf16_to_float(p[slot(c)]);
  return r;
#endif
}

// Panel p of rows (N, K) row-major, written at `out`: K * 16 weights, zeros past row N.
inline void pack_panel(const simd::bf16* rows, int n, int k, int p, simd::bf16* out) {
  constexpr int kTile = 16;
  for (int first = 0; first < k; first += kTile) {
    const int end = first + kTile < k ? first + kTile : k;
    for (int c = 0; c < kColumns; ++c) {
      const int row = p * kColumns + c;
      const simd::bf16* from = rows + static_cast<size_t>(row) * k;
      for (int i = first; i < end; ++i)
        out[static_cast<size_t>(i) * kColumns + slot(c)] = row < n ? from[i] : simd::bf16(0);
    }
  }
}

// rows (N, K) row-major -> panels.
inline void pack(const simd::bf16* rows, int n, int k, simd::bf16* out) {
  for (int p = 0; p < count(n); ++p) pack_panel(rows, n, k, p, out + offset(p, 0, k));
}

// One row out of panels, widened: K floats.
inline void unpack_row(const simd::bf16* in, int row, int k, float* out) {
  const simd::bf16* from = in + offset(row / kColumns, 0, k) + slot(row % kColumns);
  for (int i = 0; i < k; ++i) out[i] = simd::bf16_to_float(from[static_cast<size_t>(i) * kColumns]);
}

inline void unpack(const simd::bf16* in, int n, int k, simd::bf16* rows) {
  for (int row = 0; row < n; ++row)
    for (int i = 0; i < k; ++i)
      rows[static_cast<size_t>(row) * k + i] =
          in[offset(row / kColumns, i, k) + slot(row % kColumns)];
}

}  // namespace panels
