// The target distribution on float32 logits: log-sum-exp, filters and the noisy argmax of many rows.
//
// A row's bits depend on that row alone: sums run over fixed chunks of columns and are combined in chunk
// order in double, whatever thread did which chunk, and the argmax is exact, so its order does not matter.
#include "choose.h"

#include <algorithm>
#include <cmath>
#include <functional>
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
  float weight;  // e^((value - highest) / T)
};

// The filters' order: most probable first, ties by lowest id. Every filter keeps a prefix of it.
bool ahead(const Weighted& a, const Weighted& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// One thread's memory, reused over its rows.
struct Scratch {
  std::vector<ChunkSum> chunks;
  std::vector<float> edited;
  std::vector<float> block_highest;
  std::vector<float> ranked_blocks;
  std::vector<Weighted> kept;    // by ascending id
  std::vector<Weighted> ranked;  // the same in whatever order a selection leaves them
};

int chunks_of(int vocab) { return (vocab + kChunk - 1) / kChunk; }

// `count` is a multiple of the lanes; padding is -infinity and then `finite` means nothing.
template <bool one, bool scaled>
ChunkSum sum_padded(const float* x, int count, float inverse_t) {
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

ChunkSum sum_lanes(const float* x, int count, float inverse_t, bool one, bool scaled) {
  if (scaled) return sum_padded<true, true>(x, count, inverse_t);
  return one ? sum_padded<true, false>(x, count, inverse_t) : sum_padded<false, false>(x, count, inverse_t);
}

ChunkSum sum_chunk(const float* x, int count, float inverse_t, bool one, bool scaled) {
  if (count % kLanes == 0) return sum_lanes(x, count, inverse_t, one, scaled);
  float padded[kChunk];
  std::copy(x, x + count, padded);
  std::fill(padded + count, padded + kChunk, kLowest);
  ChunkSum out = sum_lanes(padded, kChunk, inverse_t, one, scaled);
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

float highest_of(const float* x, int count) {
  if (count < kBlock) return *std::max_element(x, x + count);
  F16 highest = simd::load(x);
  for (int i = kLanes; i < kBlock; i += kLanes) highest = simd::max(highest, simd::load(x + i));
  return simd::max_lane(highest);
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
    const double block_gap = best.score - race.below(highest_of(race.x + b, n));
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
  uint64_t limit = ~0ull;
  for (const Weighted& k : s.kept) {
    uint32_t hash = noise::hash32(race.key, static_cast<uint32_t>(k.token));
    if (hash >= limit) continue;
    const double before = best.score;
    race.enter(k.token, hash, best);
    if (best.score > before) limit = noise::hash_limit(best.score);
  }
  return best.token;
}

// ---- filters -------------------------------------------------------------------------------------

// A value no token cut by `below` nats under the highest can have; errs on the low side.
float floor_value(float highest, double nats_below, double t) {
  const double value = highest - (nats_below + 1e-3) * t;
  return std::nextafter(static_cast<float>(value), kLowest);
}

// The highest value that k tokens surely reach: as many blocks hold a token at least that high.
float top_k_floor(int top_k, Scratch& s) {
  if (top_k > static_cast<int>(s.block_highest.size())) return kLowest;
  s.ranked_blocks = s.block_highest;
  auto kth = s.ranked_blocks.begin() + (top_k - 1);
  std::nth_element(s.ranked_blocks.begin(), kth, s.ranked_blocks.end(), std::greater<float>());
  return *kth;
}

// A cheap lower bound of everything the filters look at, so that few tokens need a closer look.
float filter_floor(int vocab, int top_k, double top_p, double deepest, const Scan& own, double t, Scratch& s) {
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
void gather(const float* x, int vocab, float floor, float highest, double t, Scratch& s) {
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

double mass_of(const Weighted* first, const Weighted* last) {
  double mass = 0;
  for (; first != last; ++first) mass += first->weight;
  return mass;
}

// Drops from s.kept all that come after `cut` in the filters' order.
void cut_after(const Weighted& cut, Scratch& s) {
  auto end = std::remove_if(s.kept.begin(), s.kept.end(), [&](const Weighted& w) { return ahead(cut, w); });
  s.kept.erase(end, s.kept.end());
}

void cut_top_k(size_t k, Scratch& s) {
  if (k >= s.kept.size()) return;
  s.ranked = s.kept;
  std::nth_element(s.ranked.begin(), s.ranked.begin() + (k - 1), s.ranked.end(), ahead);
  cut_after(s.ranked[k - 1], s);
}

// Keeps the smallest prefix whose mass reaches the goal; all, if only rounding keeps the sum below it.
void cut_top_p(double goal, Scratch& s) {
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
Kept filter(const Call& call, int row, const float* x, const Scan& own, double t, Scratch& s) {
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
  target.filtered = call.temperatures[row] != 0 && has_filters(call, row);
  const bool sums = call.logprobs != nullptr || target.filtered;
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
  target.kept = {own.scaled, own.scaled, true};
  if (target.filtered) target.kept = filter(call, row, target.x, own, target.t, s);
  return true;
}

void write_probs(const Call& call, int row, const Target& target, Scratch& s) {
  double* out = call.probs + static_cast<int64_t>(row) * call.vocab;
  std::fill(out, out + call.vocab, 0.0);
  if (target.greedy) {
    out[target.top] = 1.0;
    return;
  }
  if (!target.filtered) gather(target.x, call.vocab, kLowest, target.highest, target.t, s);
  const double mass = mass_of(s.kept.data(), s.kept.data() + s.kept.size());
  for (const Weighted& k : s.kept) out[k.token] = k.weight / mass;
}

void write_logprobs(const Call& call, int row, const Target& target, const Scratch& s) {
  const int32_t token = call.tokens[row];
  double* out = call.logprobs + static_cast<int64_t>(row) * kColumns;
  const double raw_below = static_cast<double>(target.raw[token]) - target.raw_scan.highest;
  out[kRaw] = raw_below - noise::log64(target.raw_scan.one);
  out[kScaled] = raw_below / target.t - noise::log64(target.raw_scan.scaled);
  const Kept& kept = target.kept;
  const bool in = !target.filtered || std::any_of(s.kept.begin(), s.kept.end(),
                                                  [&](const Weighted& k) { return k.token == token; });
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
