// The target distribution on float32 logits: log-sum-exp, filters and the noisy argmax of many rows.
//
// A row's bits depend on that row alone: sums run over fixed chunks of columns and are combined in chunk
// order in double, whatever thread did which chunk, and the argmax is exact, so its order does not matter.
#include "choose.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "choose_filters.h"
#include "choose_scan.h"
#include "team.h"
#include "noise.h"

namespace choose {
namespace {

// Up to so many logits one thread has chosen from before another has woken up.
constexpr int64_t kAloneLogits = 1 << 14;

struct Best {
  double score;
  int32_t token;
};

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

int32_t race_all(const Race& race, int vocab, const Scratch& s) {
  int32_t top = first_at(race.x, vocab, static_cast<float>(race.highest), s);
  Best best{kNever, top};
  race.enter(top, noise::hash32(race.key, top), best);
  const int n = chunks_of(vocab);
  for (int c = 0; c < n; ++c)
    best = race_chunk(race, c * kChunk, std::min(kChunk, vocab - c * kChunk), s.chunks[c].highest, best);
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
bool prepare(const Call& call, int row, Scratch& s, Target& target) {
  target.filtered = call.temperatures[row] != 0 && has_filters(call, row);
  const bool sums = call.logprobs != nullptr || target.filtered;
  target.raw = target.x = call.logits + row * call.row_stride;
  target.greedy = call.temperatures[row] == 0;
  target.t = target.greedy ? 1.0 : call.temperatures[row];
  target.raw_scan = scan(target.raw, call.vocab, target.t, sums, s);
  if (!target.raw_scan.finite) return false;
  Scan own = target.raw_scan;
  if (call.edit_starts && call.edit_starts[row + 1] > call.edit_starts[row]) {
    target.x = edit(call, row, target.raw, s);
    own = scan(target.x, call.vocab, target.t, sums, s);
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

void choose_row(const Call& call, int row, Scratch& s) {
  Target target;
  call.finite[row] = prepare(call, row, s, target);
  if (!call.finite[row]) return;
  if (call.mode == kProbs) return write_probs(call, row, target, s);
  if (call.mode == kChoose) {
    const uint64_t key = noise::key(call.seeds[row], call.positions[row], call.stream);
    const Race race{target.x, target.highest, target.t, key};
    call.tokens[row] = target.greedy     ? target.top
                       : target.filtered ? race_kept(race, s)
                                         : race_all(race, call.vocab, s);
  }
  if (call.logprobs) write_logprobs(call, row, target, s);
}

}  // namespace
}  // namespace choose

void* taildraft_choosers_new(int32_t threads) {
  try {
    return new team::Team(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void taildraft_choosers_free(void* choosers) { delete static_cast<team::Team*>(choosers); }

void taildraft_choose(const choose::Call* call, void* choosers) {
  team::Team* team = static_cast<team::Team*>(choosers);
  std::atomic<int> next{0};
  auto job = [&](const team::Member&) {
    choose::Scratch scratch;
    for (int row = next.fetch_add(1); row < call->rows; row = next.fetch_add(1))
      choose::choose_row(*call, row, scratch);
  };
  const int64_t logits = static_cast<int64_t>(call->rows) * call->vocab;
  if (call->rows > 1 && logits > choose::kAloneLogits && team->usable()) team->run(job);
  else job(team::Member{0, 1, nullptr, nullptr, nullptr});
}

void taildraft_noise(int64_t seed, int64_t position, int64_t stream, int32_t first, int32_t count,
                     uint32_t* hashes, double* gumbels) {
  const uint64_t key = noise::key(seed, position, stream);
  for (int32_t i = 0; i < count; ++i) {
    hashes[i] = noise::hash32(key, static_cast<uint32_t>(first + i));
    gumbels[i] = noise::gumbel(hashes[i]);
  }
}
