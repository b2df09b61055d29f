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
#include "choose_race.h"
#include "choose_scan.h"
#include "noise.h"
#include "team.h"

namespace choose {
namespace {

// Up to so many logits one thread has chosen from before another has woken up.
constexpr int64_t kAloneLogits = 1 << 14;

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

// The winner by the logits of a second look, among the tokens that rough ones rank first. Returns whether the
// second look could tell.
bool choose_again(const Call& call, int row, const Target& target, const Race& race, Scratch& s) {
  Shortlist& list = s.shortlist;
  list.clear(call.second.tokens);
  if (target.greedy) rank_all(race, call.vocab, s, list);
  else race_all(race, call.vocab, s, list);
  float logits[kMostListed];
  call.second.look(call.second.self, row, list.tokens(), list.count(), logits);
  Best best{kNever, list.tokens()[0]};
  for (int i = 0; i < list.count(); ++i) {
    if (!std::isfinite(logits[i])) return false;
    const int32_t token = list.tokens()[i];
    const double noise = target.greedy ? 0.0 : noise::gumbel(noise::hash32(race.key, token));
    best.enter(token, race.below(logits[i]) + noise);
  }
  call.tokens[row] = best.token;
  return true;
}

void choose_row(const Call& call, int row, Scratch& s) {
  Target target;
  call.finite[row] = prepare(call, row, s, target);
  if (!call.finite[row]) return;
  if (call.mode == kProbs) return write_probs(call, row, target, s);
  if (call.mode == kChoose) {
    const uint64_t key = noise::key(call.seeds[row], call.positions[row], call.stream);
    const Race race{target.x, target.highest, target.t, key};
    if (call.second.tokens > 0) {
      call.finite[row] = choose_again(call, row, target, race, s);
      return;
    }
    call.tokens[row] = target.greedy     ? target.top
                       : target.filtered ? race_kept(race, s)
                                         : race_won(race, call.vocab, target.top, s);
  }
  if (call.logprobs) write_logprobs(call, row, target, s);
}

// A team, and what its members have allocated, kept from call to call.
struct Choosers {
  explicit Choosers(int threads) : team(threads), scratch(threads) {}

  team::Team team;
  std::vector<Scratch> scratch;
};

}  // namespace
}  // namespace choose

void* taildraft_choosers_new(int32_t threads) {
  try {
    return new choose::Choosers(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void taildraft_choosers_free(void* choosers) { delete static_cast<choose::Choosers*>(choosers); }

void taildraft_choose(const choose::Call* call, void* choosers) {
  choose::Choosers& own = *static_cast<choose::Choosers*>(choosers);
  std::atomic<int> next{0};
  auto job = [&](const team::Member& member) {
    for (int row = next.fetch_add(1); row < call->rows; row = next.fetch_add(1))
      choose::choose_row(*call, row, own.scratch[member.index]);
  };
  const int64_t logits = static_cast<int64_t>(call->rows) * call->vocab;
  if (call->rows > 1 && logits > choose::kAloneLogits && own.team.usable()) own.team.run(job);
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
