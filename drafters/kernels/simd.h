// Sixteen floats, the only vector type kernels are written in.
//
// Three back ends (AVX-512, AVX2, plain C++) give the same bits: every operation is one IEEE operation
// per lane, multiply-add is always fused and always written out, and sums over lanes have one order.
// So a result depends on neither the instruction set nor how rows were grouped. Compile with
// -ffp-contract=off: a compiler that fuses on its own breaks that.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__) && !defined(TAILDRAFT_GENERIC)
#include <immintrin.h>
#endif

namespace simd {

constexpr int kLanes = 16;
using bf16 = uint16_t;

inline float bf16_to_float(bf16 b) {
  uint32_t u = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
inline bf16 float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((u >> 16) | 0x40u);
  u += 0x7fffu + ((u >> 16) & 1u);
  return static_cast<bf16>(u >> 16);
}

#if defined(__AVX512F__) && !defined(TAILDRAFT_GENERIC) && !defined(TAILDRAFT_AVX2)

struct F16 {
  __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 load_bf16(const bf16* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}

#elif defined(__AVX2__) && defined(__FMA__) && !defined(TAILDRAFT_GENERIC)

struct F16 {
  __m256 lo, hi;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 load_bf16(const bf16* p) {
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}

#else

struct F16 {
  float v[kLanes];
};
#define TAILDRAFT_EACH(expr)                 \
  F16 r;                                     \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expr); \
  return r
inline F16 zero() { TAILDRAFT_EACH(0.0f); }
inline F16 splat(float x) { TAILDRAFT_EACH(x); }
inline F16 load(const float* p) { TAILDRAFT_EACH(p[i]); }
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 add(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] + b.v[i]); }
inline F16 sub(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] - b.v[i]); }
inline F16 mul(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] * b.v[i]); }
inline F16 div(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] / b.v[i]); }
inline F16 fma(F16 a, F16 b, F16 c) { TAILDRAFT_EACH(std::fma(a.v[i], b.v[i], c.v[i])); }
// x86's rule when an operand is NaN or both are zero: the second one.
inline F16 max(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 min(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 load_bf16(const bf16* p) { TAILDRAFT_EACH(bf16_to_float(p[i])); }
#undef TAILDRAFT_EACH

#endif

// Sum over lanes, halves folded onto each other: 16 -> 8 -> 4 -> 2 -> 1.
inline float sum(F16 a) {
  float v[kLanes];
  store(v, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

inline float max_lane(F16 a) {
  float v[kLanes];
  store(v, a);
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

inline void store_bf16(bf16* p, F16 a) {
  float v[kLanes];
  store(v, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(v[i]);
}

}  // namespace simd
