// Where a forward's time goes, as the thread that called it sees it.
//
// That thread reads a counter wherever one kind of work ends and another begins. A wait at a barrier counts to the
// work that is waited for. Nothing is computed from what is read here, so it cannot change a result.
#pragma once
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace phases {

// kLinears: all of the body, with what is fused into their outputs (bias, gate, residual sum) and the rounding of
// their inputs to 8 bits. kHead: the head's linear. kRest: embedding, norms, rotation, writing keys and values, taps.
enum Phase : int { kLinears = 0, kAttention, kHead, kRest, kCount };

// A counter of constant rate: a few nanoseconds to read.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

class Stopwatch {
 public:
  void start() {
    for (uint64_t& spent : spent_) spent = 0;
    began_ = std::chrono::steady_clock::now();
    last_ = ticks();
  }

  // What passed since the last lap was `phase`.
  void lap(Phase phase) {
    const uint64_t now = ticks();
    if (now > last_) spent_[phase] += now - last_;
    last_ = now;
  }

  // Seconds by phase: their shares of the ticks, scaled to the clock. They sum to the time since start().
  void seconds(double* out) const {
    const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - began_;
    double ticks = 0;
    for (const uint64_t spent : spent_) ticks += static_cast<double>(spent);
    for (int p = 0; p < kCount; ++p) out[p] = ticks > 0 ? whole.count() * (static_cast<double>(spent_[p]) / ticks) : 0;
  }

 private:
  uint64_t spent_[kCount] = {};
  uint64_t last_ = 0;
  std::chrono::steady_clock::time_point began_;
};

}  // namespace phases
