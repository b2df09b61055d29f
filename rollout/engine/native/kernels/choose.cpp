// The target distribution on float32 logits: log-sum-exp, filters and the noisy argmax of many rows.
//
// A row's bits depend on that row alone: sums run over fixed chunks of columns and are combined in chunk
// order in double, whatever thread did which chunk, and the argmax is exact, so its order does not matter.
#include "choose.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"
#include "simd.h"
#include "vecmath.h"

namespace choose {
namespace {

using simd::F16;
using simd::kLanes;

// Columns summed in float before doubles take over; part of the numerics.
constexpr int kChunk = 1024;
// Columns that share one look at their lowest hash.
constexpr int kBlock = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr double kNever = -std::numeric_limits<double>::infinity();

// Buckets of the filters' histogram: 1/64 nat wide, the last one takes all that is 64 nats down.
constexpr int kBuckets = 4096;
constexpr float kBucketsPerNat = 64.0f;

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

struct Best {
  double score;
  int32_t token;
};

struct Weighted {
  float value;
  int32_t token;
  float weight;
};

// Kept are the tokens above `value`, and those at it up to `token`.
struct Cut {
  float value = kLowest;
  int32_t token = -1;
  bool keeps(float v, int32_t id) const { return v > value || (v == value && id <= token); }
};

// One thread's memory, reused over its rows.
struct Scratch {
  std::vector<ChunkSum> chunks;
  std::vector<float> edited;
  std::vector<float> weights;
  std::vector<uint16_t> buckets;
  std::vector<int32_t> bucket_counts;
  std::vector<double> bucket_masses;
  std::vector<Weighted> members;
  std::vector<int32_t> kept;
};

int chunks_of(int vocab) { return (vocab + kChunk - 1) / kChunk; }

// `count` is a multiple of the lanes; padding is -infinity and then `finite` means nothing.
ChunkSum sum_padded(const float* x, int count, float inverse_t, bool one, bool scaled) {
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

ChunkSum sum_chunk(const float* x, int count, float inverse_t, bool one, bool scaled) {
  if (count % kLanes == 0) return sum_padded(x, count, inverse_t, one, scaled);
  float padded[kChunk];
  std::copy(x, x + count, padded);
  std::fill(padded + count, padded + kChunk, kLowest);
  ChunkSum out = sum_padded(padded, kChunk, inverse_t, one, scaled);
  out.finite = std::all_of(x, x + count, [](float v) { return std::isfinite(v); });
  return out;
}

// 1 / T within what float arithmetic on logits can bear: banned tokens multiply infinity by it.
float inverse_of(double t) { return static_cast<float>(std::min(std::max(1.0 / t, 1e-30), 1e30)); }

Scan scan(const float* x, int vocab, double t, bool sums, Scratch& s, int threads) {
  const int n = chunks_of(vocab);
  const bool scaled = sums && t != 1.0;
  const float inverse_t = inverse_of(t);
  s.chunks.resize(n);
#pragma omp parallel for num_threads(threads) if (threads > 1)
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

// Copies the row and applies penalties, bias and bans.
const float* edit(const Call& call, int row, const float* x, Scratch& s) {
  s.edited.assign(x, x + call.vocab);
  for (int64_t e = call.edit_starts[row]; e < call.edit_starts[row + 1]; ++e) {
    double old = s.edited[call.edit_ids[e]], divisor = call.edit_divisors[e];
    double scaled = old > 0 ? old / divisor : old * divisor;
    s.edited[call.edit_ids[e]] = static_cast<float>(scaled + call.edit_addends[e]);
  }
  return s.edited.data();
}

int32_t first_at(const float* x, int vocab, float highest, const Scratch& s) {
  for (int c = 0; c < chunks_of(vocab); ++c) {
    if (s.chunks[c].highest != highest) continue;
    const float* end = x + std::min(vocab, (c + 1) * kChunk);
    return static_cast<int32_t>(std::find(x + c * kChunk, end, highest) - x);
  }
  return 0;
}

// ---- the noisy argmax ----------------------------------------------------------------------------

struct Race {
  const float* x;
  double highest;
  double t;
  uint64_t key;

  double below(float v) const { return (v - highest) / t; }

  void enter(int32_t token, uint32_t hash, Best& best) const {
    double score = below(x[token]) + noise::gumbel(hash);
    if (score > best.score || (score == best.score && token < best.token)) best = {score, token};
  }
};

struct Products {
  uint32_t v[kBlock];
  constexpr Products() : v() {
    for (int i = 0; i < kBlock; ++i) v[i] = static_cast<uint32_t>(i) * noise::kGolden32;
  }
};
constexpr Products kProducts;

// Hashes of `kBlock` tokens from `first` on; returns the lowest.
uint32_t hash_block(uint64_t key, int32_t first, uint32_t* hashes) {
  const uint32_t low = static_cast<uint32_t>(key) + static_cast<uint32_t>(first) * noise::kGolden32;
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  uint32_t lowest = ~0u;
  for (int i = 0; i < kBlock; ++i) {
    hashes[i] = noise::hash_of_product(kProducts.v[i], low, high);
    lowest = std::min(lowest, hashes[i]);
  }
  return lowest;
}

// Noise falls as the hash grows, so only tokens whose hash lies under a limit can beat the best so far.
// First the chunk's highest logit sets the limit, then the block's own. Pruning never changes the winner.
Best race_chunk(const Race& race, int first, int count, float highest, Best best) {
  double gap = best.score - race.below(highest);
  if (gap > noise::kMaxNoise) return best;
  uint64_t limit = noise::hash_limit(gap);
  for (int b = first; b < first + count; b += kBlock) {
    uint32_t hashes[kBlock];
    if (hash_block(race.key, b, hashes) >= limit) continue;
    const int n = std::min(kBlock, first + count - b);
    float block_highest = *std::max_element(race.x + b, race.x + b + n);
    double block_gap = best.score - race.below(block_highest);
    if (block_gap > noise::kMaxNoise) continue;
    const uint64_t block_limit = noise::hash_limit(block_gap);
    const double before = best.score;
    for (int i = 0; i < n; ++i)
      if (hashes[i] < block_limit) race.enter(b + i, hashes[i], best);
    if (best.score > before) limit = noise::hash_limit(best.score - race.below(highest));
  }
  return best;
}

int32_t race_all(const Race& race, int vocab, const Scratch& s, int threads) {
  int32_t top = first_at(race.x, vocab, static_cast<float>(race.highest), s);
  Best best{kNever, top};
  race.enter(top, noise::hash32(race.key, top), best);
  const int n = chunks_of(vocab);
  if (threads == 1) {
    for (int c = 0; c < n; ++c)
      best = race_chunk(race, c * kChunk, std::min(kChunk, vocab - c * kChunk), s.chunks[c].highest, best);
    return best.token;
  }
  std::vector<Best> found(n, best);
#pragma omp parallel for num_threads(threads)
  for (int c = 0; c < n; ++c)
    found[c] = race_chunk(race, c * kChunk, std::min(kChunk, vocab - c * kChunk), s.chunks[c].highest, best);
  for (const Best& f : found)
    if (f.score > best.score || (f.score == best.score && f.token < best.token)) best = f;
  return best.token;
}

int32_t race_kept(const Race& race, const Scratch& s) {
  Best best{kNever, 0};
  for (int32_t token : s.kept) {
    uint32_t hash = noise::hash32(race.key, static_cast<uint32_t>(token));
    race.enter(token, hash, best);
  }
  return best.token;
}

// ---- filters -------------------------------------------------------------------------------------

// Fills weights e^((x - highest) / T), and the histogram of how far tokens lie below the highest.
void fill_histogram(const float* x, int vocab, float highest, double t, Scratch& s) {
  s.weights.resize(vocab);
  s.buckets.resize(vocab);
  s.bucket_counts.assign(kBuckets, 0);
  s.bucket_masses.assign(kBuckets, 0.0);
  const F16 top = simd::splat(highest), factor = simd::splat(inverse_of(t));
  for (int first = 0; first < vocab; first += kLanes) {
    const int n = std::min(kLanes, vocab - first);
    float values[kLanes], weight[kLanes], place[kLanes];
    std::fill(values, values + kLanes, kLowest);
    std::copy(x + first, x + first + n, values);
    F16 below = simd::mul(simd::sub(simd::load(values), top), factor);
    simd::store(weight, vecmath::exp(below));
    F16 place_v = simd::mul(below, simd::splat(-kBucketsPerNat));
    simd::store(place, simd::min(place_v, simd::splat(kBuckets - 1)));
    for (int i = 0; i < n; ++i) {
      const uint16_t bucket = static_cast<uint16_t>(place[i]);
      s.weights[first + i] = weight[i];
      s.buckets[first + i] = bucket;
      if (values[i] == kLowest) continue;  // banned: never kept, never counted
      ++s.bucket_counts[bucket];
      s.bucket_masses[bucket] += weight[i];
    }
  }
}

// Tokens of one bucket in the filters' order: most probable first, ties by lowest id.
const std::vector<Weighted>& sorted_bucket(const float* x, int vocab, int bucket, Scratch& s) {
  s.members.clear();
  for (int32_t i = 0; i < vocab; ++i)
    if (s.buckets[i] == bucket && x[i] != kLowest) s.members.push_back({x[i], i, s.weights[i]});
  std::sort(s.members.begin(), s.members.end(), [](const Weighted& a, const Weighted& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
  });
  return s.members;
}

// Where the buckets end that a filter may still keep: all before `bucket`, and `members` tokens of it.
struct Frontier {
  int bucket;
  int members;
  double mass;
  double last_mass;  // of those members alone
};

Frontier whole(const Scratch& s) {
  Frontier out{0, 0, 0, 0};
  for (int b = 0; b < kBuckets; ++b) {
    if (s.bucket_counts[b] == 0) continue;
    out = {b, s.bucket_counts[b], out.mass + s.bucket_masses[b], s.bucket_masses[b]};
  }
  return out;
}

// Keeps exactly k tokens.
void cut_top_k(const float* x, int vocab, int k, Scratch& s, Cut& cut, Frontier& end) {
  int64_t before = 0;
  double mass = 0;
  for (int b = 0; b <= end.bucket; ++b) {
    if (before + s.bucket_counts[b] < k) {
      before += s.bucket_counts[b];
      mass += s.bucket_masses[b];
      continue;
    }
    const auto& members = sorted_bucket(x, vocab, b, s);
    const int need = static_cast<int>(k - before);
    double last_mass = 0;
    for (int i = 0; i < need; ++i) last_mass += members[i].weight;
    cut = {members[need - 1].value, members[need - 1].token};
    end = {b, need, mass + last_mass, last_mass};
    return;
  }
}

// Keeps the smallest prefix whose mass reaches top_p of what `end` holds.
void cut_top_p(const float* x, int vocab, double top_p, Scratch& s, Cut& cut, const Frontier& end) {
  const double goal = top_p * end.mass;
  double mass = 0;
  for (int b = 0; b <= end.bucket; ++b) {
    const bool last = b == end.bucket;
    const double bucket_mass = last ? end.last_mass : s.bucket_masses[b];
    if (!last && mass + bucket_mass < goal) {
      mass += bucket_mass;
      continue;
    }
    const auto& members = sorted_bucket(x, vocab, b, s);
    const int limit = last ? end.members : s.bucket_counts[b];
    for (int i = 0; i < limit; ++i) {
      mass += members[i].weight;
      cut = {members[i].value, members[i].token};
      if (mass >= goal) return;
    }
    if (limit > 0) return;  // only rounding kept the sum below the goal
  }
}

struct Kept {
  double mass;
  double total_mass;
  bool all;
};

// Leaves the kept ids, ascending, in the scratch.
Kept filter(const Call& call, int row, const float* x, float highest, double t, Scratch& s) {
  fill_histogram(x, call.vocab, highest, t, s);
  Cut cut;
  Frontier end = whole(s);
  const double total_mass = end.mass;
  int64_t count = 0;
  for (int32_t c : s.bucket_counts) count += c;
  if (call.top_k[row] > 0 && call.top_k[row] < count) cut_top_k(x, call.vocab, call.top_k[row], s, cut, end);
  if (call.top_p[row] < 1.0) cut_top_p(x, call.vocab, call.top_p[row], s, cut, end);
  const double min_p = call.min_p[row];
  const double deepest = min_p > 0 ? -noise::log64(min_p) : std::numeric_limits<double>::infinity();
  s.kept.clear();
  double mass = 0;
  for (int32_t i = 0; i < call.vocab; ++i) {
    if (s.buckets[i] > end.bucket || !cut.keeps(x[i], i)) continue;
    if ((static_cast<double>(highest) - x[i]) / t > deepest) continue;
    s.kept.push_back(i);
    mass += s.weights[i];
  }
  return {mass, total_mass, static_cast<int64_t>(s.kept.size()) == count};
}

// ---- one row -------------------------------------------------------------------------------------

bool has_filters(const Call& call, int row) {
  return call.top_k && (call.top_k[row] > 0 || call.top_p[row] < 1.0 || call.min_p[row] > 0);
}

// What one row became after edits, temperature and filters.
struct Target {
  const float* raw;
  const float* x;  // after edits
  Scan raw_scan;
  float highest;  // of x
  double t;       // 1 when greedy
  bool greedy;
  bool filtered;
  int32_t top;  // the most probable token, lowest id
  Kept kept;
};

// Returns whether the row can be chosen from at all.
bool prepare(const Call& call, int row, Scratch& s, int threads, Target& target) {
  const bool sums = call.logprobs != nullptr;
  target.raw = target.x = call.logits + row * call.row_stride;
  target.greedy = call.temperatures[row] == 0;
  target.t = target.greedy ? 1.0 : call.temperatures[row];
  target.raw_scan = scan(target.raw, call.vocab, target.t, sums, s, threads);
  if (!target.raw_scan.finite) return false;
  Scan own = target.raw_scan;
  if (call.edit_starts && call.edit_starts[row + 1] > call.edit_starts[row]) {
    target.x = edit(call, row, target.raw, s);
    own = scan(target.x, call.vocab, target.t, sums, s, threads);
    if (!std::isfinite(own.highest)) return false;  // everything banned, or a bias past float
  }
  target.highest = own.highest;
  target.top = first_at(target.x, call.vocab, own.highest, s);
  target.filtered = !target.greedy && has_filters(call, row);
  target.kept = {own.scaled, own.scaled, true};
  if (target.filtered) target.kept = filter(call, row, target.x, own.highest, target.t, s);
  return true;
}

void write_probs(const Call& call, int row, const Target& target, Scratch& s) {
  double* out = call.probs + static_cast<int64_t>(row) * call.vocab;
  std::fill(out, out + call.vocab, 0.0);
  if (target.greedy) {
    out[target.top] = 1.0;
  } else if (target.filtered) {
    for (int32_t token : s.kept) out[token] = s.weights[token] / target.kept.mass;
  } else {
    fill_histogram(target.x, call.vocab, target.highest, target.t, s);
    double mass = 0;
    for (float w : s.weights) mass += w;
    for (int i = 0; i < call.vocab; ++i) out[i] = s.weights[i] / mass;
  }
}

void write_logprobs(const Call& call, int row, const Target& target, const Scratch& s) {
  const int32_t token = call.tokens[row];
  double* out = call.logprobs + static_cast<int64_t>(row) * kColumns;
  const double raw_below = static_cast<double>(target.raw[token]) - target.raw_scan.highest;
  out[kRaw] = raw_below - noise::log64(target.raw_scan.one);
  out[kScaled] = raw_below / target.t - noise::log64(target.raw_scan.scaled);
  const Kept& kept = target.kept;
  const bool in = !target.filtered || std::binary_search(s.kept.begin(), s.kept.end(), token);
  const double below = (static_cast<double>(target.x[token]) - target.highest) / target.t;
  out[kTarget] = in ? below - noise::log64(kept.mass) : kNever;
  if (target.greedy) out[kTarget] = token == target.top ? 0.0 : kNever;
  // Two sums over the same weights may differ in the last bit: a mass above 1 would be that.
  out[kKeptLogmass] =
      kept.all ? 0.0 : std::min(0.0, noise::log64(kept.mass) - noise::log64(kept.total_mass));
}

void choose_row(const Call& call, int row, Scratch& s, int threads) {
  Target target;
  call.finite[row] = prepare(call, row, s, threads, target);
  if (!call.finite[row]) return;
  if (call.mode == kProbs) return write_probs(call, row, target, s);
  if (call.mode == kChoose) {
    const uint64_t key = noise::key(call.seeds[row], call.positions[row], call.stream);
    const Race race{target.x, target.highest, target.t, key};
    call.tokens[row] = target.greedy     ? target.top
                       : target.filtered ? race_kept(race, s)
                                         : race_all(race, call.vocab, s, threads);
  }
  if (call.logprobs) write_logprobs(call, row, target, s);
}

}  // namespace
}  // namespace choose

void taildraft_choose(const choose::Call* call) {
  using choose::Scratch;
  if (call->rows >= call->threads) {
#pragma omp parallel num_threads(call->threads)
    {
      Scratch scratch;
#pragma omp for schedule(dynamic)
      for (int row = 0; row < call->rows; ++row) choose::choose_row(*call, row, scratch, 1);
    }
    return;
  }
  Scratch scratch;
  for (int row = 0; row < call->rows; ++row) choose::choose_row(*call, row, scratch, call->threads);
}

void taildraft_noise(int64_t seed, int64_t position, int64_t stream, int32_t first, int32_t count,
                     uint32_t* hashes, double* gumbels) {
  const uint64_t key = noise::key(seed, position, stream);
  for (int32_t i = 0; i < count; ++i) {
    hashes[i] = noise::hash32(key, static_cast<uint32_t>(first + i));
    gumbels[i] = noise::gumbel(hashes[i]);
  }
}
