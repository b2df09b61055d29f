// Sixteen 32-bit integers beside simd.h's sixteen floats. Integer arithmetic is exact, so the back ends
// agree by construction; AVX-512 builds use the same two halves as AVX2.
#pragma once
#include "simd.h"

namespace int4 {

using simd::F16;

#if defined(__AVX2__) && defined(__FMA__) && !defined(TAILDRAFT_GENERIC)
#define TAILDRAFT_INT_AVX2 1

struct I16 {
  __m256i lo, hi;
};

inline F16 to_float(I16 a) {
#if defined(__AVX512F__) && !defined(TAILDRAFT_AVX2)
  return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a.lo), a.hi, 1))};
#else
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
#endif
}

// Round to nearest even. The caller keeps lanes finite and inside the range of int32.
inline I16 to_int(F16 a) {
#if defined(__AVX512F__) && !defined(TAILDRAFT_AVX2)
  __m512i v = _mm512_cvtps_epi32(a.v);
  return {_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)};
#else
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
#endif
}

// Bytes 0..3 of each lane are the low bytes of the same lane of a, b, c and d.
inline I16 bytes(I16 a, I16 b, I16 c, I16 d) {
  const __m256i low = _mm256_set1_epi32(0xff);
  auto join = [low](__m256i p, __m256i q, __m256i r, __m256i s) {
    __m256i pq = _mm256_or_si256(_mm256_and_si256(p, low), _mm256_slli_epi32(_mm256_and_si256(q, low), 8));
    __m256i rs = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(r, low), 16), _mm256_slli_epi32(s, 24));
    return _mm256_or_si256(pq, rs);
  };
  return {join(a.lo, b.lo, c.lo, d.lo), join(a.hi, b.hi, c.hi, d.hi)};
}

inline void store(void* p, I16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, a.hi);
}

// Eight lanes: lanes 0-7 of a, with lanes 8-15 shifted up by four bits laid over them.
inline void store_nibbles(void* p, I16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_or_si256(a.lo, _mm256_slli_epi32(a.hi, 4)));
}

#else

struct I16 {
  int32_t v[simd::kLanes];
};

inline F16 to_float(I16 a) {
  float f[simd::kLanes];
  for (int i = 0; i < simd::kLanes; ++i) f[i] = static_cast<float>(a.v[i]);
  return simd::load(f);
}

inline I16 to_int(F16 a) {
  float f[simd::kLanes];
  simd::store(f, a);
  I16 r;
  for (int i = 0; i < simd::kLanes; ++i) r.v[i] = static_cast<int32_t>(std::nearbyint(f[i]));
  return r;
}

inline I16 bytes(I16 a, I16 b, I16 c, I16 d) {
  I16 r;
  for (int i = 0; i < simd::kLanes; ++i)
    r.v[i] = static_cast<int32_t>((static_cast<uint32_t>(a.v[i]) & 0xffu) | (static_cast<uint32_t>(b.v[i]) & 0xffu) << 8 |
                                  (static_cast<uint32_t>(c.v[i]) & 0xffu) << 16 | static_cast<uint32_t>(d.v[i]) << 24);
  return r;
}

inline void store(void* p, I16 a) { std::memcpy(p, a.v, sizeof a.v); }

inline void store_nibbles(void* p, I16 a) {
  uint32_t words[8];
  for (int i = 0; i < 8; ++i) words[i] = static_cast<uint32_t>(a.v[i]) | static_cast<uint32_t>(a.v[i + 8]) << 4;
  std::memcpy(p, words, sizeof words);
}

#endif

}  // namespace int4
