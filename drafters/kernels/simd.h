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

// Adding 1.5 * 2^23 leaves a small number's nearest integer in the low bits of the sum.
constexpr float kIntegerShift = 12582912.0f;
constexpr int kSqrtHalfBits = 0x3f3504f3;

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
inline void add_product(F16& sum, F16 a, F16 b) { sum = fma(a, b, sum); }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 load_bf16(const bf16* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
// Lanes where a < b take x, the others (NaN too) y.
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// p * 2^n by adding to the exponent field, n being the low bits of shifted = n + kIntegerShift.
inline F16 scale_by_power(F16 p, F16 shifted) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
}
// Splits positive normal x into mantissa * 2^exponent, the mantissa within [sqrt(1/2), sqrt(2)).
inline F16 split_power(F16 x, F16* mantissa) {
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i e = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(kSqrtHalfBits)), 23);
  mantissa->v = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(e, 23)));
  return {_mm512_cvtepi32_ps(e)};
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
// sum += a * b. Spelt out, since each sum then keeps its register: where there are about as many sums as registers,
// compilers write into a factor's instead and copy sums about, and older cores have no place left for a copy.
inline void add_product(F16& sum, F16 a, F16 b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.lo) : "x"(a.lo), "x"(b.lo));
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.hi) : "x"(a.hi), "x"(b.hi));
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 load_bf16(const bf16* p) {
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
namespace detail {
inline __m256 scale_half(__m256 p, __m256 shifted) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}
inline __m256 split_half(__m256 x, __m256* mantissa) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i e = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(kSqrtHalfBits)), 23);
  *mantissa = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(e, 23)));
  return _mm256_cvtepi32_ps(e);
}
}  // namespace detail
inline F16 scale_by_power(F16 p, F16 shifted) {
  return {detail::scale_half(p.lo, shifted.lo), detail::scale_half(p.hi, shifted.hi)};
}
inline F16 split_power(F16 x, F16* mantissa) {
  return {detail::split_half(x.lo, &mantissa->lo), detail::split_half(x.hi, &mantissa->hi)};
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
inline void add_product(F16& sum, F16 a, F16 b) { sum = fma(a, b, sum); }
// x86's rule when an operand is NaN or both are zero: the second one.
inline F16 max(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 min(F16 a, F16 b) { TAILDRAFT_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 load_bf16(const bf16* p) { TAILDRAFT_EACH(bf16_to_float(p[i])); }
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) { TAILDRAFT_EACH(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
namespace detail {
inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float of_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
}  // namespace detail
inline F16 scale_by_power(F16 p, F16 shifted) {
  TAILDRAFT_EACH(detail::of_bits(detail::bits_of(p.v[i]) + (detail::bits_of(shifted.v[i]) << 23)));
}
inline F16 split_power(F16 x, F16* mantissa) {
  F16 r;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits = detail::bits_of(x.v[i]);
    // An arithmetic shift of the signed difference: compilers this builds on all provide it.
    int32_t e = static_cast<int32_t>(bits - static_cast<uint32_t>(kSqrtHalfBits)) >> 23;
    mantissa->v[i] = detail::of_bits(bits - (static_cast<uint32_t>(e) << 23));
    r.v[i] = static_cast<float>(e);
  }
  return r;
}
#undef TAILDRAFT_EACH

#endif

#if defined(__AVX2__) && defined(__FMA__) && !defined(TAILDRAFT_GENERIC)

namespace detail {
// The sixteen as two halves of eight.
inline void halves(F16 a, __m256* low, __m256* high) {
#if defined(__AVX512F__) && !defined(TAILDRAFT_AVX2)
  *low = _mm512_castps512_ps256(a.v);
  *high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
#else
  *low = a.lo, *high = a.hi;
#endif
}
}  // namespace detail
// Sum over lanes, halves folded onto each other: 16 -> 8 -> 4 -> 2 -> 1.
inline float sum(F16 a) {
  __m256 low, high;
  detail::halves(a, &low, &high);
  const __m256 eight = _mm256_add_ps(low, high);
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// The largest lane, folded the same way; a NaN may be lost.
inline float max_lane(F16 a) {
  __m256 low, high;
  detail::halves(a, &low, &high);
  const __m256 eight = _mm256_max_ps(low, high);
  __m128 v = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  v = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}

#else

inline float sum(F16 a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}

inline float max_lane(F16 a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

#endif

inline void store_bf16(bf16* p, F16 a) {
  float v[kLanes];
  store(v, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(v[i]);
}

}  // namespace simd
