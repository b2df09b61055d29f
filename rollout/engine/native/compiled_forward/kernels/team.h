// A team of threads that runs one job at a time, and the barrier inside a job.
//
// Waiting spins first, since a phase of a forward lasts microseconds; then it gives the processor away, since it
// may be shared; then it sleeps, since whoever is late may need this very processor. Between jobs the members wait
// alike, but yielding for as long as a caller in Python is busy between two forwards, before they sleep: waking a
// sleeper takes about as long as a forward of a small policy. A team does not survive fork(): usable() says so.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace team {

// About 30 microseconds: longer than any phase's imbalance, far shorter than a time slice.
constexpr int kSpins = 1500;

// As long again of yielding; a wait beyond both means that a member has lost its processor for milliseconds.
constexpr int kYields = 50;
constexpr std::chrono::microseconds kNap(50);

// How long members yield between jobs.
constexpr std::chrono::microseconds kLinger(500);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One try of a wait that has failed `tries` times.
inline void pause(int tries) {
  if (tries < kSpins) relax();
  else if (tries < kSpins + kYields) sched_yield();
  else std::this_thread::sleep_for(kNap);
}

class alignas(64) Barrier {
 public:
  void wait(int members) {
    if (members == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int tries = 0; phase_.load(std::memory_order_acquire) == phase; ++tries) pause(tries);
  }

 private:
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

struct Range {
  int begin, end;
};

// How many members' shares a member looks at for work once its own is done.
constexpr int kHelped = 3;

// Claims on the chunks of one member's share, counted since the job began.
struct alignas(64) Claims {
  std::atomic<int> count{0};
};

// One thread's place in a running job.
struct Member {
  int index, size;
  Barrier* barrier;
  Claims* claims;  // one per member
  int* settled;    // this member's own: what each count stood at when the phase began

  void wait() const { barrier->wait(size); }

  // This member's share of n equal pieces; shares are contiguous, in the order of members.
  Range share(int n) const { return share_of(index, n); }

  // Calls work(range) until all of n pieces are done or under way: this member's share chunk by chunk, then
  // chunks that its neighbours have not come to, since a core that its host gives to others for a while must
  // not hold up the rest. Every member calls it alike in a phase, and a barrier stands between two phases.
  template <class Work>
  void deal(int n, int chunk, Work work) const {
    const int visits = std::min(size, kHelped + 1);
    for (int step = 0; step < visits; ++step) {
      const int owner = (index + step) % size;
      const Range all = share_of(owner, n);
      const int chunks = (all.end - all.begin + chunk - 1) / chunk;
      for (;;) {
        const int next = claims[owner].count.fetch_add(1, std::memory_order_relaxed) - settled[owner];
        if (next >= chunks) break;
        const int begin = all.begin + next * chunk;
        work(Range{begin, std::min(begin + chunk, all.end)});
      }
    }
    // Each visitor of a share claims in vain exactly once, so all know what the counts stand at now.
    for (int owner = 0; owner < size; ++owner) {
      const Range all = share_of(owner, n);
      settled[owner] += (all.end - all.begin + chunk - 1) / chunk + visits;
    }
  }

 private:
  Range share_of(int member, int n) const {
    return {static_cast<int>(static_cast<int64_t>(n) * member / size),
            static_cast<int>(static_cast<int64_t>(n) * (member + 1) / size)};
  }
};

class Team {
 public:
  explicit Team(int size) : size_(size), pid_(getpid()), claims_(size), settled_(size, std::vector<int>(size)) {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    if (getpid() != pid_) {
      // The threads stayed in the parent process; there is nothing to join here.
      for (std::thread& thread : threads_) thread.detach();
      return;
    }
    post(nullptr, nullptr);
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  bool usable() const { return size_ == 1 || getpid() == pid_; }

  // Calls job(member) on every member and returns when all have. One caller at a time; job must not throw.
  template <class Job>
  void run(Job& job) {
    for (Claims& claims : claims_) claims.count.store(0, std::memory_order_relaxed);
    for (std::vector<int>& settled : settled_) std::fill(settled.begin(), settled.end(), 0);
    if (size_ > 1) post([](void* f, const Member& m) { (*static_cast<Job*>(f))(m); }, &job);
    const Member caller = member(0);
    job(caller);
    caller.wait();
  }

 private:
  using Call = void (*)(void*, const Member&);

  Member member(int index) { return {index, size_, &barrier_, claims_.data(), settled_[index].data()}; }

  void post(Call call, void* job) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      call_ = call;
      job_ = job;
      posted_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }

  void serve(int index) {
    const Member self = member(index);
    for (int seen = 0;; ++seen) {
      linger(seen);
      Call call;
      void* job;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        wake_.wait(hold, [&] { return posted_.load(std::memory_order_relaxed) != seen; });
        call = call_;
        job = job_;
      }
      if (call == nullptr) return;
      call(job, self);
      self.wait();
    }
  }

  // Waits for a job after `seen` of them, but not for long.
  void linger(int seen) const {
    const auto nothing_new = [&] { return posted_.load(std::memory_order_acquire) == seen; };
    for (int spins = 0; spins < kSpins && nothing_new(); ++spins) relax();
    for (const auto end = std::chrono::steady_clock::now() + kLinger;
         nothing_new() && std::chrono::steady_clock::now() < end;)
      sched_yield();
  }

  const int size_;
  const pid_t pid_;
  Barrier barrier_;
  std::vector<Claims> claims_;
  std::vector<std::vector<int>> settled_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> posted_{0};
  Call call_ = nullptr;
  void* job_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace team
