// Choosing tokens from logits: the call's memory layout, shared with rollout/engine/chooser_call.py.
#pragma once
#include <cstdint>

namespace choose {

enum Mode : int32_t { kChoose = 0, kScore = 1, kProbs = 2 };

// Logprobs per row in `logprobs`.
enum Column : int32_t { kRaw = 0, kScaled = 1, kTarget = 2, kKeptLogmass = 3, kColumns = 4 };

// Most tokens of a row that a second look takes.
constexpr int kMostListed = 64;

// For logits that are cheap and rough: a look at better ones, of the tokens that the rough ones and their noise
// rank first. It decides among those. Called for several rows at once, by as many threads.
struct Second {
  void (*look)(const void* self, int32_t row, const int32_t* tokens, int32_t count, float* logits);
  const void* self;
  int32_t tokens;  // of each row, up to kMostListed; 0: there is none
};

// Pointers are to arrays over rows unless said otherwise; the caller owns all of them.
struct Call {
  const float* logits;         // row r starts at logits + r * row_stride
  int64_t row_stride;          // in floats
  const int64_t* seeds;
  const int64_t* positions;
  const double* temperatures;  // 0 is greedy
  const int32_t* top_k;        // these three are null when no row has filters; 0 keeps all
  const double* top_p;
  const double* min_p;
  const int64_t* edit_starts;  // rows + 1 offsets into the edit arrays; null when no row has edits
  const int32_t* edit_ids;
  const double* edit_divisors;
  const double* edit_addends;
  int32_t* tokens;             // in for kScore, out for kChoose
  double* logprobs;            // rows x kColumns, or null when not wanted
  double* probs;               // rows x vocab, for kProbs
  uint8_t* finite;             // out: whether the row's other outputs count
  int64_t stream;
  int32_t rows;
  int32_t vocab;
  int32_t mode;
  Second second;  // for kChoose without filters, edits and logprobs
};

// A chooser as another library calls it, without being linked against this one: its function by address.
struct Port {
  void (*choose)(const Call* call, void* choosers);
  void* choosers;

  void operator()(const Call& call) const { choose(&call, choosers); }
};

}  // namespace choose

extern "C" {
// Threads that share the rows of a call, asleep between calls: a thread that spins after its work would take
// the processor a forward is about to need. One call at a time. Null when they cannot be started.
void* taildraft_choosers_new(int32_t threads);
void taildraft_choosers_free(void* choosers);
void taildraft_choose(const choose::Call* call, void* choosers);
// The hash and the noise of tokens first .. first + count, for tests against the reference.
void taildraft_noise(int64_t seed, int64_t position, int64_t stream, int32_t first, int32_t count,
                     uint32_t* hashes, double* gumbels);
}
