// Draft passes one after the other in one call: what a pass chooses are the tokens of the next.
#pragma once
#include <algorithm>
#include <chrono>

#include "choose.h"
#include "decoder.h"

namespace chain {

// Rows stand by falling gamma, so those that draft on are always the first of them: nothing is ever moved.
// M rows in the first pass, G passes.
struct Call {
  forward::Call forward;  // rows, KV and loops; the rest is set pass by pass
  choose::Call choose;    // seeds, temperatures and filters; the rest is set pass by pass
  choose::Port port;
  const int32_t* gammas;  // (M), falling
  int32_t* tokens;        // (G + 1, M): in, the last committed ones; out, pass by pass what was chosen
  int32_t* positions;     // (M), of the tokens in; counted up
  int64_t* next;          // (M), of the tokens chosen; counted up
  uint8_t* finite;        // (M), of the last pass
  double* phase_s;        // out, by phases::Phase, of all passes
  double choose_s;        // out
  int32_t shortlist;      // tokens of a row whose logits the head gives, the screen those of all; 0: the head does
  int32_t keep_states;    // 1: `forward.hidden` has a row for every row of every pass, in order; 0: M rows
  int32_t forwards;       // out: passes whose forward ran
  int32_t passes;         // out: passes that chose a token for every row
};

inline int live_rows(const Call& call, int pass) {
  int live = 0;
  while (live < call.forward.rows && call.gammas[live] > pass) ++live;
  return live;
}

inline forward::Status run_forward(forward::Decoder& decoder, const Call& call, int pass, int live, float* hidden) {
  double phase_s[phases::kCount];
  forward::Call one = call.forward;
  one.rows = one.head_rows = live;
  one.screened = call.shortlist > 0;
  one.tokens = call.tokens + static_cast<size_t>(pass) * call.forward.rows;
  one.positions = call.positions;
  one.hidden = hidden;
  one.phase_s = phase_s;
  const forward::Status status = decoder.run(one);
  if (status == forward::kOk)
    for (int p = 0; p < phases::kCount; ++p) call.phase_s[p] += phase_s[p];
  return status;
}

inline void look_again(const void* decoder, int32_t row, const int32_t* tokens, int32_t count, float* logits) {
  static_cast<const forward::Decoder*>(decoder)->look_again(row, tokens, count, logits);
}

// Returns whether every row could be chosen from.
inline bool run_choice(const forward::Decoder& decoder, Call& call, int pass, int live) {
  const auto began = std::chrono::steady_clock::now();
  choose::Call one = call.choose;
  one.logits = call.forward.logits;
  one.rows = live;
  one.positions = call.next;
  one.tokens = call.tokens + static_cast<size_t>(pass + 1) * call.forward.rows;
  one.finite = call.finite;
  one.second = {look_again, &decoder, call.shortlist};
  call.port(one);
  call.choose_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  for (int m = 0; m < live; ++m)
    if (!call.finite[m]) return false;
  return true;
}

// Ends early where a forward is refused (the status says why) or a row cannot be chosen from.
inline forward::Status run(forward::Decoder& decoder, Call& call) {
  std::fill(call.phase_s, call.phase_s + phases::kCount, 0.0);
  float* hidden = call.forward.hidden;
  for (int pass = 0;; ++pass) {
    const int live = live_rows(call, pass);
    if (live == 0) return forward::kOk;
    const forward::Status status = run_forward(decoder, call, pass, live, hidden);
    if (status != forward::kOk) return status;
    ++call.forwards;
    if (!run_choice(decoder, call, pass, live)) return forward::kOk;
    ++call.passes;
    for (int m = 0; m < live; ++m) ++call.positions[m], ++call.next[m];
    if (call.keep_states) hidden += static_cast<size_t>(live) * decoder.width();
  }
}

}  // namespace chain
