// Counter-based noise, bit for bit the hash of rollout/engine/noise.py, and its Gumbel values in double.
//
// Plain scalar code: every operation is an integer operation or one IEEE operation, so compilers may
// vectorise it as they like without changing a bit. log and exp are our own for the same reason: the C
// library's differ between versions and processors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace noise {

constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;
constexpr uint32_t kGolden32 = 0x9E3779B1u;
constexpr uint32_t kMultiplier1 = 0x21F0AAADu;
constexpr uint32_t kMultiplier2 = 0xD35A2D97u;
// No noise is larger: a token further than this below the best candidate cannot win.
constexpr double kMaxNoise = 22.875;

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint64_t key(uint64_t seed, uint64_t position, uint64_t stream) {
  return mix64(mix64(seed + kGolden64) + (position << 16) + stream);
}

// The hash of a token whose id times kGolden32 is already known.
inline uint32_t hash_of_product(uint32_t product, uint32_t low, uint32_t high) {
  uint32_t x = (product + low) ^ high;
  x = (x ^ (x >> 16)) * kMultiplier1;
  x = (x ^ (x >> 15)) * kMultiplier2;
  return x ^ (x >> 15);
}

inline uint32_t hash32(uint64_t key, uint32_t token) {
  return hash_of_product(token * kGolden32, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

constexpr double kLn2 = 0.693147180559945309417232121458;
// ln 2 in two parts; a small integer times the first is exact.
constexpr double kLn2High = 0x1.62e42fee00000p-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// ln x of a normal positive x, to about one unit in the last place also next to 1.
inline double log64(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  // Shifts the exponent so that the mantissa lands within [sqrt(1/2), sqrt(2)).
  constexpr uint64_t kSqrtHalfBits = 0x3FE6A09E667F3BCDull;
  int64_t e = static_cast<int64_t>(bits - kSqrtHalfBits) >> 52;
  bits -= static_cast<uint64_t>(e) << 52;
  double m;
  std::memcpy(&m, &bits, 8);
  double f = m - 1.0;
  double s = f / (2.0 + f);
  double z = s * s;
  double r = 2.0 / 23;
  for (int k = 21; k >= 3; k -= 2) r = std::fma(r, z, 2.0 / k);
  // ln(1 + f) = 2s + s z (2/3 + 2 z/5 + ...) = f - s (f - z r): f itself is exact.
  double n = static_cast<double>(e);
  double tail = std::fma(-s, std::fma(-z, r, f), n * kLn2Low);
  return std::fma(n, kLn2High, f + tail);
}

// e^x for x <= 709; 0 below -708.
inline double exp64(double x) {
  if (!(x > -708.0)) return 0.0;
  double n = std::nearbyint(x * (1.0 / kLn2));
  double r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  double p = 1.0;
  for (int k = 13; k >= 1; --k) p = std::fma(p * r, 1.0 / k, 1.0);
  uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, 8);
  return p * scale;
}

// Standard Gumbel noise of a hash: -log(-log(1 - u)), 1 - u exact. Decreases as the hash grows.
inline double gumbel(uint32_t hash) {
  double complement = (static_cast<double>(~hash) + 0.5) * 0x1p-32;
  return -log64(-log64(complement));
}

// Hashes at or above this have noise below `gap`, so most tokens cost only their hash. The share of hashes
// with more noise than g is 1 - exp(-e^-g) <= e^-g; the margin covers the rounding of every formula here.
inline uint64_t hash_limit(double gap) {
  constexpr double kMargin = 1e-6;
  if (gap < kMargin) return 1ull << 32;
  return static_cast<uint64_t>(exp64(kMargin - gap) * 0x1p32) + 1;
}

}  // namespace noise
