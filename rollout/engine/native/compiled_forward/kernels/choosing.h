// A forward, the choices from its logits, and what those change in plain decoding, in one call.
//
// The choice reads logits that the head wrote. Taking sums of their chunks while those are still near a core would
// spare one such read: about a tenth of choosing from 64 rows of 49152 logits and nothing at one row, where they
// are near a core anyway. That is a few thousandths of a round, so the head stays a linear like any other.
#pragma once
#include <chrono>

#include "choose.h"
#include "decoder.h"
#include "plain.h"
#include "standing.h"

namespace choosing {

// M rows, R head rows; the choice has a row per head row.
struct Call {
  forward::Call forward;
  choose::Call choose;    // but for logits, row_stride, rows and vocab, which are the forward's
  choose::Port port;
  const int32_t* depths;  // (M), loops each row has had; null: every row starts at its token
  const int32_t* numbers; // (M), which of the states is each row's
  const float* states;
  plain::Columns* plain;  // what the choices move on, a row per head row; null: nothing
  double choose_s;        // out
};

inline forward::Status run_forward(forward::Decoder& decoder, const Call& call) {
  if (!call.depths) return decoder.run(call.forward);
  standing::gather(call.forward, call.depths, call.numbers, call.states, decoder.width());
  return standing::run(decoder, call.forward, call.depths);
}

// Where the forward is refused nothing is chosen; the status says why.
inline forward::Status run(forward::Decoder& decoder, Call& call) {
  const forward::Status status = run_forward(decoder, call);
  call.choose_s = 0;
  if (status != forward::kOk || call.forward.head_rows == 0) return status;
  const auto began = std::chrono::steady_clock::now();
  choose::Call one = call.choose;
  one.logits = call.forward.logits;
  one.row_stride = one.vocab = decoder.vocab();
  one.rows = call.forward.head_rows;
  call.port(one);
  if (call.plain) plain::advance(*call.plain, one);
  call.choose_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return status;
}

}  // namespace choosing
