// One pass over a row of logits: its maximum, log-sum-exps, and whether it is finite.
//
// Sums run over fixed chunks of columns and are combined in chunk order in double, whatever thread did which
// chunk, so a row's bits depend on that row alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "choose_shortlist.h"
#include "noise.h"
#include "simd.h"
#include "vecmath.h"

namespace choose {

using simd::F16;
using simd::kLanes;

// Columns summed in float before doubles take over; part of the numerics.
constexpr int kChunk = 1024;
// Columns that share one look at their lowest hash.
constexpr int kBlock = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct ChunkSum {
  float highest;
  float one;     // sum of e^(x - highest)
  float scaled;  // sum of e^((x - highest) / T)
  bool finite;
};

struct Scan {
  float highest = kLowest;
  bool finite = true;
  double one = 0;  // as above, relative to the row's highest
  double scaled = 0;
};

struct Weighted {
  float value;
  int32_t token;
  float weight;  // e^((value - highest) / T)
};

// The filters' order: most probable first, ties by lowest id. Every filter keeps a prefix of it.
inline bool ahead(const Weighted& a, const Weighted& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// One thread's memory, reused over its rows; on cache lines of its own.
struct alignas(64) Scratch {
  std::vector<ChunkSum> chunks;
  std::vector<float> edited;
  std::vector<float> block_highest;
  std::vector<float> ranked_blocks;
  std::vector<Weighted> kept;    // by ascending id
  std::vector<Weighted> ranked;  // the same in whatever order a selection leaves them
  Shortlist shortlist;
};

inline int chunks_of(int vocab) { return (vocab + kChunk - 1) / kChunk; }

// `count` is a multiple of the lanes; padding is -infinity and then `finite` means nothing.
template <bool one, bool scaled>
inline ChunkSum sum_padded(const float* x, int count, float inverse_t) {
  F16 highest = simd::splat(kLowest), off = simd::zero();
  for (int i = 0; i < count; i += kLanes) {
    F16 v = simd::load(x + i);
    highest = simd::max(highest, v);
    off = simd::fma(v, simd::zero(), off);  // 0 unless v is infinite or NaN
  }
  ChunkSum out{simd::max_lane(highest), 0, 0, simd::sum(off) == 0.0f};
  if (out.highest == kLowest || !(one || scaled)) return out;
  F16 top = simd::splat(out.highest), factor = simd::splat(inverse_t);
  F16 sum_one = simd::zero(), sum_scaled = simd::zero();
  for (int i = 0; i < count; i += kLanes) {
    F16 below = simd::sub(simd::load(x + i), top);
    if (one) sum_one = simd::add(sum_one, vecmath::exp(below));
    if (scaled) sum_scaled = simd::add(sum_scaled, vecmath::exp(simd::mul(below, factor)));
  }
  out.one = simd::sum(sum_one);
  out.scaled = simd::sum(sum_scaled);
  return out;
}

inline ChunkSum sum_lanes(const float* x, int count, float inverse_t, bool one, bool scaled) {
  if (scaled) return sum_padded<true, true>(x, count, inverse_t);
  return one ? sum_padded<true, false>(x, count, inverse_t) : sum_padded<false, false>(x, count, inverse_t);
}

inline ChunkSum sum_chunk(const float* x, int count, float inverse_t, bool one, bool scaled) {
  if (count % kLanes == 0) return sum_lanes(x, count, inverse_t, one, scaled);
  float padded[kChunk];
  std::copy(x, x + count, padded);
  std::fill(padded + count, padded + kChunk, kLowest);
  ChunkSum out = sum_lanes(padded, kChunk, inverse_t, one, scaled);
  out.finite = std::all_of(x, x + count, [](float v) { return std::isfinite(v); });
  return out;
}

// 1 / T within what float arithmetic on logits can bear: banned tokens multiply infinity by it.
inline float inverse_of(double t) { return static_cast<float>(std::min(std::max(1.0 / t, 1e-30), 1e30)); }

inline Scan scan(const float* x, int vocab, double t, bool sums, Scratch& s) {
  const int n = chunks_of(vocab);
  const bool scaled = sums && t != 1.0;
  const float inverse_t = inverse_of(t);
  s.chunks.resize(n);
  for (int c = 0; c < n; ++c)
    s.chunks[c] = sum_chunk(x + c * kChunk, std::min(kChunk, vocab - c * kChunk), inverse_t, sums, scaled);
  Scan out;
  for (const ChunkSum& c : s.chunks) {
    out.highest = std::max(out.highest, c.highest);
    out.finite = out.finite && c.finite;
  }
  if (!sums || !std::isfinite(out.highest)) return out;
  for (const ChunkSum& c : s.chunks) {
    double below = static_cast<double>(c.highest) - out.highest;
    out.one += c.one * noise::exp64(below);
    if (scaled) out.scaled += c.scaled * noise::exp64(below / t);
  }
  if (!scaled) out.scaled = out.one;
  return out;
}

inline int32_t first_at(const float* x, int vocab, float highest, const Scratch& s) {
  for (int c = 0; c < chunks_of(vocab); ++c) {
    if (s.chunks[c].highest != highest) continue;
    const float* end = x + std::min(vocab, (c + 1) * kChunk);
    return static_cast<int32_t>(std::find(x + c * kChunk, end, highest) - x);
  }
  return 0;
}

inline float highest_of(const float* x, int count) {
  if (count < kBlock) return *std::max_element(x, x + count);
  F16 highest = simd::load(x);
  for (int i = kLanes; i < kBlock; i += kLanes) highest = simd::max(highest, simd::load(x + i));
  return simd::max_lane(highest);
}

}  // namespace choose
