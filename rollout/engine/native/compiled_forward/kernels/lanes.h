// The passes of a round for tokens that travel through the loops together, in one call: what lanes/lane_passes.py does
// pass by pass, without Python between two passes. lanes/wavefront.py says why that is plain decoding.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "choose.h"
#include "decoder.h"

namespace lanes {

constexpr int32_t kNone = -1;

enum Origin : int32_t { kPlain = 0, kAccepted, kCorrected };

struct Lane {
  int32_t token, loops_run;
  int32_t successor;  // what its readout proposes, or kNone
};

// One sequence. Its lanes stand on consecutive positions, the deepest first.
struct Chain {
  int64_t seed;
  double temperature, top_p, min_p;
  int32_t top_k;
  int32_t table;     // row of the page table and of the states
  int32_t position;  // of the deepest lane; counted up
  int32_t most_lanes, room, remaining;
  int32_t stops, stops_end;  // its part of Call::stops
  int32_t lanes;             // in and out
  int32_t committed;         // out
  int32_t over;              // out: nothing it still computes could be committed
  int32_t unread;            // out: a proposal's readout was not finite
};

// What the target chose after a chain's deepest lane.
struct Commit {
  double logprobs[choose::kColumns];
  int32_t token, finite, origin;
  int32_t draft;  // what the lane behind it held, or kNone where there was none
};

// B chains, L lanes of each at most, T passes at most.
struct Call {
  forward::Call forward;  // KV and page tables; the rest is set pass by pass
  choose::Port port;
  Chain* chain;           // (B)
  Lane* lane;             // (B, L)
  Commit* commit;         // (B, T)
  const int32_t* stops;   // tokens that end a sequence
  float* states;          // (tables, L, hidden): of the lane at position p of a table in p mod L
  double* phase_s;        // out, by phases::Phase, of all passes
  double choose_s;        // out
  int64_t rows, context_tokens;  // out, over all passes
  int32_t chains, lanes_each, loops, depth, filters;
  int32_t most_passes;
  int32_t passes;  // out
};

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

class Run {
 public:
  Run(forward::Decoder& decoder, int vocab, Call& call)
      : decoder_(decoder), call_(call), vocab_(vocab), width_(decoder.width()) {}

  forward::Status all() {
    while (call_.passes < call_.most_passes) {
      if (call_.passes >= call_.loops && any_over()) break;
      place();
      if (placed_.empty()) break;
      const forward::Status status = advance();
      if (status != forward::kOk) return status;
      choose();
      act();
    }
    return forward::kOk;
  }

 private:
  struct Place {
    int chain, index;
  };

  Chain& chain(const Place& at) { return call_.chain[at.chain]; }
  Lane* lanes_of(int chain) { return call_.lane + static_cast<size_t>(chain) * call_.lanes_each; }
  int position(const Place& at) { return chain(at).position + at.index; }

  float* state(const Place& at) {
    const int row = chain(at).table * call_.lanes_each + position(at) % call_.lanes_each;
    return call_.states + static_cast<size_t>(row) * width_;
  }

  bool any_over() const {
    return std::any_of(call_.chain, call_.chain + call_.chains, [](const Chain& own) { return own.over; });
  }

  // ---- who runs: first the lanes that get the target's choice, then those that propose, then the others

  void place() {
    placed_.clear(), shallow_.clear(), others_.clear();
    for (int c = 0; c < call_.chains; ++c) {
      Chain& own = call_.chain[c];
      if (own.over) continue;
      enter(own, lanes_of(c));
      for (int i = 0; i < own.lanes; ++i) {
        const int loops_run = lanes_of(c)[i].loops_run + 1;
        // A choice after the last token that is allowed would be of no use.
        const bool reads = own.committed + i + 1 < own.remaining;
        if (loops_run == call_.loops) placed_.push_back({c, i});
        else if (loops_run == call_.depth && reads) shallow_.push_back({c, i});
        else others_.push_back({c, i});
      }
    }
    final_ = static_cast<int>(placed_.size());
    heads_ = final_ + static_cast<int>(shallow_.size());
    placed_.insert(placed_.end(), shallow_.begin(), shallow_.end());
    placed_.insert(placed_.end(), others_.begin(), others_.end());
  }

  // Lets the last lane's successor in, where there is one and room for it.
  static void enter(Chain& own, Lane* lane) {
    const int successor = lane[own.lanes - 1].successor;
    if (successor == kNone || own.lanes >= own.most_lanes || own.committed + own.lanes > own.room) return;
    lane[own.lanes++] = {successor, 0, kNone};
  }

  // ---- one loop further

  forward::Status advance() {
    const size_t rows = placed_.size();
    for (std::vector<int32_t>* numbers : {&tokens_, &positions_, &tables_, &loops_, &heads_index_})
      numbers->resize(std::max(rows, numbers->size()));
    hidden_.resize(std::max(rows * width_, hidden_.size()));
    logits_.resize(std::max(static_cast<size_t>(heads_) * vocab_, logits_.size()));
    for (size_t m = 0; m < rows; ++m) {
      const Place& at = placed_[m];
      const Lane& lane = lanes_of(at.chain)[at.index];
      tokens_[m] = lane.token, loops_[m] = lane.loops_run;
      positions_[m] = position(at), tables_[m] = chain(at).table;
      heads_index_[m] = static_cast<int32_t>(m);
      if (lane.loops_run) std::memcpy(hidden_.data() + m * width_, state(at), width_ * sizeof(float));
      call_.context_tokens += positions_[m] + 1;
    }
    const forward::Status status = run_forward(static_cast<int>(rows));
    if (status != forward::kOk) return status;
    for (size_t m = 0; m < rows; ++m) {
      const Place& at = placed_[m];
      std::memcpy(state(at), hidden_.data() + m * width_, width_ * sizeof(float));
      ++lanes_of(at.chain)[at.index].loops_run;
    }
    ++call_.passes;
    call_.rows += static_cast<int64_t>(rows);
    return forward::kOk;
  }

  forward::Status run_forward(int rows) {
    double phase_s[phases::kCount];
    forward::Call one = call_.forward;
    one.rows = rows, one.head_rows = heads_;
    one.loop_begin = 0, one.loop_end = 1;
    one.tokens = tokens_.data(), one.row_loop = loops_.data();
    one.positions = positions_.data(), one.table = tables_.data(), one.head_index = heads_index_.data();
    one.hidden = hidden_.data(), one.logits = logits_.data();
    one.phase_s = phase_s;
    const forward::Status status = decoder_.run(one);
    if (status != forward::kOk) return status;
    for (int p = 0; p < phases::kCount; ++p) call_.phase_s[p] += phase_s[p];
    return forward::kOk;
  }

  // ---- what the readouts say

  void choose() {
    const Clock::time_point began = Clock::now();
    const size_t rows = static_cast<size_t>(heads_);
    for (std::vector<int64_t>* numbers : {&seeds_, &next_}) numbers->resize(std::max(rows, numbers->size()));
    for (std::vector<double>* numbers : {&temperatures_, &top_p_, &min_p_})
      numbers->resize(std::max(rows, numbers->size()));
    for (std::vector<int32_t>* numbers : {&top_k_, &chosen_}) numbers->resize(std::max(rows, numbers->size()));
    finite_.resize(std::max(rows, finite_.size()));
    logprobs_.resize(std::max(static_cast<size_t>(final_) * choose::kColumns, logprobs_.size()));
    for (int r = 0; r < heads_; ++r) {
      const Chain& own = chain(placed_[r]);
      seeds_[r] = own.seed, next_[r] = position(placed_[r]) + 1;
      temperatures_[r] = own.temperature;
      top_k_[r] = own.top_k, top_p_[r] = own.top_p, min_p_[r] = own.min_p;
    }
    // A proposal is chosen exactly as the target would choose from these logits; nobody asks for its logprobs.
    choose_rows(0, final_, logprobs_.data());
    choose_rows(final_, heads_, nullptr);
    call_.choose_s += seconds_since(began);
  }

  void choose_rows(int begin, int end, double* logprobs) {
    if (begin == end) return;
    choose::Call one{};
    one.logits = logits_.data() + static_cast<size_t>(begin) * vocab_;
    one.row_stride = one.vocab = vocab_;
    one.seeds = seeds_.data() + begin, one.positions = next_.data() + begin;
    one.temperatures = temperatures_.data() + begin;
    if (call_.filters)
      one.top_k = top_k_.data() + begin, one.top_p = top_p_.data() + begin, one.min_p = min_p_.data() + begin;
    one.tokens = chosen_.data() + begin;
    one.finite = finite_.data() + begin;
    one.logprobs = logprobs;
    one.rows = end - begin;
    one.mode = choose::kChoose;
    call_.port(one);
  }

  // Proposals first: a commit ends lanes and renumbers those behind.
  void act() {
    for (int r = final_; r < heads_; ++r) {
      const Place& at = placed_[r];
      if (finite_[r]) lanes_of(at.chain)[at.index].successor = chosen_[r];
      else chain(at).unread = 1;
    }
    for (int r = 0; r < final_; ++r) commit(placed_[r].chain, r);
  }

  // Takes the target's choice after the deepest lane, which ends it and decides about the next.
  void commit(int index, int row) {
    Chain& own = call_.chain[index];
    Lane* lane = lanes_of(index);
    Commit& out = call_.commit[static_cast<size_t>(index) * call_.most_passes + own.committed];
    out = {};
    out.finite = finite_[row];
    if (out.finite) {
      std::memcpy(out.logprobs, logprobs_.data() + row * choose::kColumns, sizeof(out.logprobs));
      out.token = chosen_[row];
    }
    std::copy(lane + 1, lane + own.lanes, lane);
    --own.lanes;
    out.draft = own.lanes ? lane[0].token : kNone;
    const bool kept = own.lanes && out.finite && out.token == out.draft;
    out.origin = kept ? kAccepted : own.lanes ? kCorrected : kPlain;
    if (!kept) lane[0] = {out.token, 0, kNone}, own.lanes = 1;
    ++own.position, ++own.committed;
    const int32_t* end = call_.stops + own.stops_end;
    const bool stops = std::find(call_.stops + own.stops, end, out.token) != end;
    own.over = stops || !out.finite || own.committed == own.remaining;
  }

  forward::Decoder& decoder_;
  Call& call_;
  const int vocab_;
  const size_t width_;
  std::vector<Place> placed_, shallow_, others_;  // between passes `placed_` holds all three kinds
  int final_ = 0, heads_ = 0;
  std::vector<int32_t> tokens_, positions_, tables_, loops_, heads_index_, top_k_, chosen_;
  std::vector<int64_t> seeds_, next_;
  std::vector<double> temperatures_, top_p_, min_p_, logprobs_;
  std::vector<uint8_t> finite_;
  std::vector<float> hidden_, logits_;
};

inline forward::Status run(forward::Decoder& decoder, Call& call) {
  return Run(decoder, decoder.vocab(), call).all();
}

}  // namespace lanes
