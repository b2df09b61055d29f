// Top-k, top-p and min-p: each keeps a prefix of the tokens in the order (value descending, id ascending).
//
// A cheap floor leaves few tokens to look at; selection, not sorting, finds where the prefix ends.
#pragma once
#include <functional>

#include "choose.h"
#include "choose_scan.h"

namespace choose {

// A value no token cut by `below` nats under the highest can have; errs on the low side.
inline float floor_value(float highest, double nats_below, double t) {
  const double value = highest - (nats_below + 1e-3) * t;
  return std::nextafter(static_cast<float>(value), kLowest);
}

// The highest value that k tokens surely reach: as many blocks hold a token at least that high.
inline float top_k_floor(int top_k, Scratch& s) {
  if (top_k > static_cast<int>(s.block_highest.size())) return kLowest;
  s.ranked_blocks = s.block_highest;
  auto kth = s.ranked_blocks.begin() + (top_k - 1);
  std::nth_element(s.ranked_blocks.begin(), kth, s.ranked_blocks.end(), std::greater<float>());
  return *kth;
}

// A cheap lower bound of everything the filters look at, so that few tokens need a closer look.
inline float filter_floor(int vocab, int top_k, double top_p, double deepest, const Scan& own, double t, Scratch& s) {
  if (top_k > 0 && top_p < 1.0) return top_k_floor(top_k, s);  // top-p needs the mass of all k
  float floor = floor_value(own.highest, deepest, t);
  if (top_k > 0) floor = std::max(floor, top_k_floor(top_k, s));
  // Tokens that light weigh less than what top-p leaves out, all of them together. The 1e-6 is for the
  // rounding of the sums.
  const double light = (1.0 - top_p - 1e-6) * own.scaled / vocab;
  if (light > 0) floor = std::max(floor, floor_value(own.highest, -noise::log64(light), t));
  return floor;
}

// Leaves all tokens at or above the floor in s.kept, with their weights. Banned ones never count.
inline void gather(const float* x, int vocab, float floor, float highest, double t, Scratch& s) {
  s.kept.clear();
  for (int b = 0; b < vocab; b += kBlock) {
    if (floor > kLowest && s.block_highest[b / kBlock] < floor) continue;
    for (int i = b; i < std::min(vocab, b + kBlock); ++i)
      if (x[i] >= floor && x[i] != kLowest) s.kept.push_back({x[i], i, 0.0f});
  }
  const F16 top = simd::splat(highest), factor = simd::splat(inverse_of(t));
  for (size_t first = 0; first < s.kept.size(); first += kLanes) {
    const size_t n = std::min<size_t>(kLanes, s.kept.size() - first);
    float lanes[kLanes] = {};
    for (size_t i = 0; i < n; ++i) lanes[i] = s.kept[first + i].value;
    simd::store(lanes, vecmath::exp(simd::mul(simd::sub(simd::load(lanes), top), factor)));
    for (size_t i = 0; i < n; ++i) s.kept[first + i].weight = lanes[i];
  }
}

inline double mass_of(const Weighted* first, const Weighted* last) {
  double mass = 0;
  for (; first != last; ++first) mass += first->weight;
  return mass;
}

// Drops from s.kept all that come after `cut` in the filters' order.
inline void cut_after(const Weighted& cut, Scratch& s) {
  auto end = std::remove_if(s.kept.begin(), s.kept.end(), [&](const Weighted& w) { return ahead(cut, w); });
  s.kept.erase(end, s.kept.end());
}

inline void cut_top_k(size_t k, Scratch& s) {
  if (k >= s.kept.size()) return;
  s.ranked = s.kept;
  std::nth_element(s.ranked.begin(), s.ranked.begin() + (k - 1), s.ranked.end(), ahead);
  cut_after(s.ranked[k - 1], s);
}

// Keeps the smallest prefix whose mass reaches the goal; all, if only rounding keeps the sum below it.
inline void cut_top_p(double goal, Scratch& s) {
  s.ranked = s.kept;
  Weighted* low = s.ranked.data();
  Weighted* high = low + s.ranked.size();
  double before = 0;  // of the tokens ahead of `low`
  // The token whose weight reaches the goal is within [low, high); halve that until it is alone.
  while (high - low > 1) {
    Weighted* middle = low + (high - low - 1) / 2;
    std::nth_element(low, middle, high, ahead);
    const double mass = before + mass_of(low, middle + 1);
    if (mass >= goal) {
      high = middle + 1;
    } else {
      before = mass;
      low = middle + 1;
    }
  }
  cut_after(*low, s);
}

struct Kept {
  double mass;
  double total_mass;
  bool all;
};

// Leaves the kept tokens in s.kept.
inline Kept filter(const Call& call, int row, const float* x, const Scan& own, double t, Scratch& s) {
  const int top_k = call.top_k[row];
  const double top_p = call.top_p[row], min_p = call.min_p[row];
  const double deepest = min_p > 0 ? -noise::log64(min_p) : std::numeric_limits<double>::infinity();
  s.block_highest.clear();
  for (int b = 0; b < call.vocab; b += kBlock)
    s.block_highest.push_back(highest_of(x + b, std::min(kBlock, call.vocab - b)));
  const int64_t allowed = call.vocab - std::count(x, x + call.vocab, kLowest);
  gather(x, call.vocab, filter_floor(call.vocab, top_k, top_p, deepest, own, t, s), own.highest, t, s);
  if (top_k > 0) cut_top_k(top_k, s);
  const bool cut_by_k = top_k > 0 && top_k < allowed;
  const double mass_k = cut_by_k ? mass_of(s.kept.data(), s.kept.data() + s.kept.size()) : own.scaled;
  if (top_p < 1.0) cut_top_p(top_p * mass_k, s);
  auto end = std::remove_if(s.kept.begin(), s.kept.end(), [&](const Weighted& w) {
    return (static_cast<double>(own.highest) - w.value) / t > deepest;
  });
  s.kept.erase(end, s.kept.end());
  const double mass = mass_of(s.kept.data(), s.kept.data() + s.kept.size());
  return {mass, own.scaled, static_cast<int64_t>(s.kept.size()) == allowed};
}

}  // namespace choose
