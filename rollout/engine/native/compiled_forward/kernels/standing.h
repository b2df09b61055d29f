// A forward whose rows have had different numbers of loops: each is taken on from where it stands.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "decoder.h"

namespace standing {

// The rows that a pass takes further, one beside the other.
class Part {
 public:
  Part(const forward::Call& call, const int32_t* depth, int width) : call_(call), depth_(depth), width_(width) {}

  // Takes the rows that have had at most `begin` loops.
  void take(int begin) {
    rows_.clear(), tokens_.clear(), positions_.clear(), table_.clear();
    for (int m = 0; m < call_.rows; ++m) {
      if (depth_[m] > begin) continue;
      rows_.push_back(m);
      tokens_.push_back(call_.tokens[m]);
      positions_.push_back(call_.positions[m]);
      table_.push_back(call_.table[m]);
    }
    hidden_.resize(rows_.size() * width_);
    for (size_t i = 0; begin > 0 && i < rows_.size(); ++i) copy(hidden_.data() + i * width_, state(i));
  }

  forward::Call pass(int begin, int end) {
    forward::Call one = call_;
    one.rows = static_cast<int32_t>(rows_.size());
    one.head_rows = 0;
    one.heads_only = 0;  // later passes go on from all of these states
    one.loop_begin = begin, one.loop_end = end;
    one.tokens = begin == 0 ? tokens_.data() : nullptr;
    one.positions = positions_.data();
    one.table = table_.data();
    one.hidden = hidden_.data();
    return one;
  }

  // Puts the states where the call has them.
  void put() const {
    for (size_t i = 0; i < rows_.size(); ++i) copy(state(i), hidden_.data() + i * width_);
  }

 private:
  float* state(size_t i) const { return call_.hidden + static_cast<size_t>(rows_[i]) * width_; }
  void copy(float* to, const float* from) const { std::memcpy(to, from, width_ * sizeof(float)); }

  const forward::Call& call_;
  const int32_t* depth_;
  const size_t width_;
  std::vector<int32_t> rows_, tokens_, positions_, table_;
  std::vector<float> hidden_;
};

// Puts the states of the rows that have one where the call has them.
inline void gather(const forward::Call& call, const int32_t* depth, const int32_t* number, const float* states,
                   size_t width) {
  for (int m = 0; m < call.rows; ++m)
    if (depth[m] > 0) std::memcpy(call.hidden + m * width, states + number[m] * width, width * sizeof(float));
}

// Runs a pass and adds what it took to `phase_s`.
inline forward::Status run_pass(forward::Decoder& decoder, forward::Call one, double* phase_s) {
  double pass_s[phases::kCount] = {};
  one.phase_s = pass_s;
  const forward::Status status = decoder.run(one);
  for (int p = 0; p < phases::kCount; ++p) phase_s[p] += pass_s[p];
  return status;
}

// The shallowest rows go first and meet the next deeper ones where those stand: one pass per distinct depth, the
// last of them, with the head, over all rows. Where a row's depth is not 0, `call.hidden` holds its state.
inline forward::Status run(forward::Decoder& decoder, const forward::Call& call, const int32_t* depth) {
  std::vector<int32_t> stops(depth, depth + call.rows);
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  if (stops.empty()) return forward::kOk;
  if (stops.front() < 0 || stops.back() >= call.loop_end) return forward::kBadLoop;
  std::fill(call.phase_s, call.phase_s + phases::kCount, 0.0);
  Part part(call, depth, decoder.width());
  for (size_t i = 0; i + 1 < stops.size(); ++i) {
    part.take(stops[i]);
    const forward::Status status = run_pass(decoder, part.pass(stops[i], stops[i + 1]), call.phase_s);
    if (status != forward::kOk) return status;
    part.put();
  }
  forward::Call last = call;
  last.loop_begin = stops.back();
  if (last.loop_begin > 0) last.tokens = nullptr;
  return run_pass(decoder, last, call.phase_s);
}

}  // namespace standing
