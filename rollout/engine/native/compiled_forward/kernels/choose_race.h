// The noisy argmax: the token whose logit and noise have the highest sum, or the few that lead.
#pragma once
#include <algorithm>
#include <cstring>

#include "choose.h"
#include "choose_scan.h"
#include "choose_shortlist.h"
#include "noise.h"

namespace choose {

struct Race {
  const float* x;
  double highest;
  double t;
  uint64_t key;

  double below(float v) const { return (v - highest) / t; }
  double score(int32_t token, uint32_t hash) const { return below(x[token]) + noise::gumbel(hash); }
};

struct Products {
  uint32_t v[kBlock];
  constexpr Products() : v() {
    for (int i = 0; i < kBlock; ++i) v[i] = static_cast<uint32_t>(i) * noise::kGolden32;
  }
};
constexpr Products kProducts;

// Hashes of `kBlock` tokens from `first` on; returns the lowest.
inline uint32_t hash_block(uint64_t key, int32_t first, uint32_t* hashes) {
  const uint32_t low = static_cast<uint32_t>(key) + static_cast<uint32_t>(first) * noise::kGolden32;
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  uint32_t lowest = ~0u;
  for (int i = 0; i < kBlock; ++i) {
    hashes[i] = noise::hash_of_product(kProducts.v[i], low, high);
    lowest = std::min(lowest, hashes[i]);
  }
  return lowest;
}

// No less than the scores of a block's tokens, and hardly more where noise is high: it is at most -log u, u = hash
// / 2^32, and the bits of a float, read as a number, are a line through the powers of two under its logarithm.
// What stands past `n` has no score.
inline void bound_block(const Race& race, int first, int n, const uint32_t* hashes, float* bounds) {
  // For what float rounds: of noise as a number, of the distance from the highest as a share.
  constexpr float kLn2 = 0.693147181f, kRounding = 1e-3f, kShare = 1.0f - 1e-6f;
  const float highest = static_cast<float>(race.highest), inverse_t = inverse_of(race.t) * kShare;
  float x[kBlock];
  std::copy(race.x + first, race.x + first + n, x);
  std::fill(x + n, x + kBlock, kLowest);
  for (int i = 0; i < kBlock; ++i) {
    const float half = static_cast<float>(static_cast<int32_t>(hashes[i] >> 1));
    int32_t bits;
    std::memcpy(&bits, &half, 4);
    const float noise = kLn2 * (158.0f - static_cast<float>(bits) * 0x1p-23f);
    bounds[i] = (x[i] - highest) * inverse_t + noise + kRounding;
  }
}

// Noise falls as the hash grows, so only tokens whose hash lies under a limit can reach the bar of the leaders
// (`Best` or `Shortlist`): the chunk's highest logit sets it. Where a block has such a hash, bounds of its scores say
// which to compute. Pruning never changes who leads.
template <class Leaders>
inline void race_chunk(const Race& race, int first, int count, float highest, Leaders& leaders) {
  double gap = leaders.bar() - race.below(highest);
  if (gap > noise::kMaxNoise) return;
  uint64_t limit = noise::hash_limit(gap);
  for (int b = first; b < first + count; b += kBlock) {
    uint32_t hashes[kBlock];
    if (hash_block(race.key, b, hashes) >= limit) continue;
    float bounds[kBlock];
    bound_block(race, b, std::min(kBlock, first + count - b), hashes, bounds);
    if (highest_of(bounds, kBlock) < leaders.bar()) continue;
    const double before = leaders.bar();
    for (int i = 0; i < kBlock && b + i < first + count; ++i)
      if (bounds[i] >= leaders.bar()) leaders.enter(b + i, race.score(b + i, hashes[i]));
    if (leaders.bar() > before) limit = noise::hash_limit(leaders.bar() - race.below(highest));
  }
}

// Runs `chunk(first, count, highest)` over all chunks, that of the highest logit first: leaders found early
// spare the others most of their work.
template <class Chunk>
inline void best_chunk_first(const Race& race, int vocab, const Scratch& s, const Chunk& chunk) {
  const int n = chunks_of(vocab);
  int best = 0;
  while (best < n - 1 && s.chunks[best].highest < race.highest) ++best;
  const auto run = [&](int c) { chunk(c * kChunk, std::min(kChunk, vocab - c * kChunk), s.chunks[c].highest); };
  run(best);
  for (int c = 0; c < n; ++c)
    if (c != best) run(c);
}

inline int32_t race_won(const Race& race, int vocab, int32_t top, const Scratch& s) {
  Best best{kNever, top};
  best.enter(top, race.score(top, noise::hash32(race.key, top)));
  for (int c = 0; c < chunks_of(vocab); ++c)
    race_chunk(race, c * kChunk, std::min(kChunk, vocab - c * kChunk), s.chunks[c].highest, best);
  return best.token;
}

inline void race_all(const Race& race, int vocab, const Scratch& s, Shortlist& list) {
  best_chunk_first(race, vocab, s, [&](int first, int count, float highest) {
    race_chunk(race, first, count, highest, list);
  });
}

// As above, without noise.
inline void rank_all(const Race& race, int vocab, const Scratch& s, Shortlist& list) {
  best_chunk_first(race, vocab, s, [&](int first, int count, float highest) {
    if (race.below(highest) < list.bar()) return;
    for (int i = first; i < first + count; ++i) list.enter(i, race.below(race.x[i]));
  });
}

inline int32_t race_kept(const Race& race, const Scratch& s) {
  Best best{kNever, 0};
  uint64_t limit = ~0ull;
  for (const Weighted& k : s.kept) {
    uint32_t hash = noise::hash32(race.key, static_cast<uint32_t>(k.token));
    if (hash >= limit) continue;
    const double before = best.score;
    best.enter(k.token, race.score(k.token, hash));
    if (best.score > before) limit = noise::hash_limit(best.score);
  }
  return best.token;
}

}  // namespace choose
