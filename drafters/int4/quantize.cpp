// Rounding of weights into the packed buffers of linear_int4.h, and the linears alone, behind a C interface.
//
// Sixteen columns of a panel are sixteen lanes, so the extremes of a group are vertical operations. Every
// step is one float operation that drafters/int4/rounding.py repeats in torch: codes are equal, not close.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "linear_int4.h"

namespace {

using int4::I16;
using namespace simd;

// Beyond this a group's range would leave float.
constexpr float kLargest = 1e38f;

// Sixteen columns of row-major floats as k-major lanes; columns past n are zero.
struct Rows {
  const float* data;
  int n, k;
  std::vector<float> scratch;

  void open(int panel) {
    scratch.assign(static_cast<size_t>(k) * kLanes, 0.0f);
    for (int c = 0; c < kLanes && panel * kLanes + c < n; ++c) {
      const float* row = data + static_cast<size_t>(panel * kLanes + c) * k;
      for (int i = 0; i < k; ++i) scratch[static_cast<size_t>(i) * kLanes + c] = row[i];
    }
  }
  F16 at(int i) const { return load(scratch.data() + static_cast<size_t>(i) * kLanes); }
};

struct Panels {
  const bf16* data;
  int n, k;
  const bf16* panel_data = nullptr;

  void open(int panel) { panel_data = data + panels::offset(panel, 0, k); }
  F16 at(int i) const { return panels::load(panel_data + static_cast<size_t>(i) * kLanes); }
};

// Whether every weight seen was finite and no larger than kLargest.
struct Guard {
  F16 poison = zero();  // zero times NaN or infinity is NaN, and stays
  F16 largest = zero();

  void see(F16 w) { poison = fma(w, zero(), poison); }
  void see_extremes(F16 lo, F16 hi) { largest = max(largest, max(hi, sub(zero(), lo))); }
  bool passed() const { return sum(poison) == 0.0f && max_lane(largest) <= kLargest; }
};

// Lanes whose value is under kTiny give 0 for both; others give (value, numerator / value).
struct Reciprocal {
  F16 value, inverse;

  Reciprocal(F16 v, float numerator) {
    float lane[kLanes], over[kLanes];
    store(lane, v);
    for (int c = 0; c < kLanes; ++c) {
      bool usable = lane[c] >= int4::kTiny;
      over[c] = usable ? numerator / lane[c] : 0.0f;
      if (!usable) lane[c] = 0.0f;
    }
    value = load(lane);
    inverse = load(over);
  }
};

// In the slot order of bf16_panels.h.
void store_slots(F16 a, uint8_t* out) {
  float lanes[kLanes];
  bf16 slots[kLanes];
  store(lanes, a);
  for (int c = 0; c < kLanes; ++c) slots[panels::slot(c)] = float_to_bf16(lanes[c]);
  std::memcpy(out, slots, sizeof slots);
}

F16 rounded_to_bf16(F16 a) {
  float v[kLanes];
  store(v, a);
  for (float& x : v) x = bf16_to_float(float_to_bf16(x));
  return load(v);
}

// How sixteen groups are rounded: code = round((w - minimum) / step), both bf16 values.
struct Grid {
  F16 minimum;
  Reciprocal step;

  F16 distance(F16 w) const { return sub(w, minimum); }
  // max(x, 0) is 0 for NaN, so a code is defined even in a panel that will be refused.
  F16 code(F16 w) const { return min(max(mul(distance(w), step.inverse), zero()), splat(15.0f)); }
};

// The straight line through (code, distance) that least squares asks for, where it stays within half a step of
// `first` over all codes; `first` elsewhere. Extremes are noisy ends of a group: on weights a quarter of a step
// off a 4-bit grid the line lowers the rounding error by a fifth.
template <class Source>
Grid refitted(const Source& w, int begin, int end, const Grid& first) {
  F16 q = zero(), qq = zero(), d = zero(), qd = zero();
  for (int i = begin; i < end; ++i) {
    const F16 v = w.at(i), distance = first.distance(v), code = int4::to_float(int4::to_int(first.code(v)));
    q = add(q, code);
    qq = add(qq, mul(code, code));
    d = add(d, distance);
    qd = add(qd, mul(code, distance));
  }
  const F16 n = splat(static_cast<float>(end - begin));
  const F16 slope = div(sub(mul(n, qd), mul(q, d)), sub(mul(n, qq), mul(q, q)));
  const F16 offset = div(sub(d, mul(slope, q)), n);
  float step[kLanes], minimum[kLanes], old_step[kLanes], old_minimum[kLanes];
  store(step, rounded_to_bf16(slope));
  store(minimum, rounded_to_bf16(add(first.minimum, offset)));
  store(old_step, first.step.value);
  store(old_minimum, first.minimum);
  for (int c = 0; c < kLanes; ++c) {
    const float moved = minimum[c] - old_minimum[c], top_moved = (step[c] - old_step[c]) * 15.0f + moved;
    const float most = old_step[c] * 0.5f;
    // Comparisons with NaN are false: a group of equal codes has no line.
    if (step[c] >= int4::kTiny && std::fabs(moved) <= most && std::fabs(top_moved) <= most) continue;
    step[c] = old_step[c];
    minimum[c] = old_minimum[c];
  }
  return {load(minimum), Reciprocal(load(step), 1.0f)};
}

template <class Source>
bool round_panel4(const Source& w, int k, int group, uint8_t* out) {
  Guard guard;
  for (int begin = 0; begin < k; begin += group) {
    const int end = std::min(k, begin + group);
    F16 lo = w.at(begin), hi = lo;
    for (int i = begin; i < end; ++i) {
      F16 v = w.at(i);
      guard.see(v);
      lo = min(lo, v);
      hi = max(hi, v);
    }
    guard.see_extremes(lo, hi);
    const Grid between_extremes{rounded_to_bf16(lo), Reciprocal(rounded_to_bf16(div(sub(hi, lo), splat(15.0f))), 1.0f)};
    const Grid grid = refitted(w, begin, end, between_extremes);
    auto code = [&](int i) { return int4::to_int(i < end ? grid.code(w.at(i)) : zero()); };
    for (int b = begin; b < end; b += int4::kBlock, out += int4::kBlockBytes4) {
      for (int i = 0; i < int4::kBlock; i += 4)
        int4::store_nibbles(out + 8 * i, int4::bytes(code(b + i), code(b + i + 1), code(b + i + 2), code(b + i + 3)));
      store_slots(grid.step.value, out + int4::kCodeBytes4);
      store_slots(grid.minimum, out + int4::kCodeBytes4 + 2 * kLanes);
    }
  }
  return guard.passed();
}

template <class Source>
bool round_panel8(const Source& w, int k, int8_t* out, float* scale) {
  Guard guard;
  F16 amax = zero();
  for (int i = 0; i < k; ++i) {
    F16 v = w.at(i);
    guard.see(v);
    amax = max(amax, max(v, sub(zero(), v)));
  }
  guard.see_extremes(amax, amax);
  const Reciprocal top(amax, 127.0f);
  const F16 limit = splat(127.0f), floor = splat(-127.0f);
  auto code = [&](int i) {
    if (i >= k) return int4::to_int(zero());
    return int4::to_int(min(max(mul(w.at(i), top.inverse), floor), limit));
  };
  for (int i = 0; i < int4::padded(k); i += 4)
    int4::store(out + 16 * i, int4::bytes(code(i), code(i + 1), code(i + 2), code(i + 3)));
  store(scale, div(top.value, limit));
  return guard.passed();
}

// Calls body(source, panel) for every panel and returns how many were refused.
template <class Source, class Body>
int each_panel(const Source& prototype, int threads, Body body) {
  int refused = 0;
#pragma omp parallel num_threads(threads) reduction(+ : refused)
  {
    Source source = prototype;
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels::count(prototype.n); ++panel) {
      source.open(panel);
      if (!body(source, panel)) ++refused;
    }
  }
  return refused;
}

template <class Source>
int quantize4(const Source& source, int group, uint8_t* out, int threads) {
  const size_t bytes = int4::panel_bytes4(source.k);
  return each_panel(source, threads, [=](const Source& w, int panel) {
    return round_panel4(w, w.k, group, out + panel * bytes);
  });
}

template <class Source>
int quantize8(const Source& source, int8_t* out, float* scale, int threads) {
  const size_t bytes = int4::panel_bytes8(source.k);
  return each_panel(source, threads, [=](const Source& w, int panel) {
    return round_panel8(w, w.k, out + panel * bytes, scale + panel * kLanes);
  });
}

template <class Weight>
void linear_rows(const Weight& w, const float* x, int rows, float* y, int threads) {
  const int nb = int4::blocks(w.k), stride = int4::padded(w.k);
  std::vector<int8_t> q(static_cast<size_t>(rows) * stride);
  std::vector<float> scale(static_cast<size_t>(rows) * nb), scaled_sum(scale.size());
  const int4::Activations activations{q.data(), scale.data(), scaled_sum.data(), w.k};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int r = 0; r < rows; ++r)
      int4::quantize_row(x + static_cast<size_t>(r) * w.k, w.k, q.data() + static_cast<size_t>(r) * stride,
                         scale.data() + static_cast<size_t>(r) * nb, scaled_sum.data() + static_cast<size_t>(r) * nb);
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels::count(w.n); ++panel)
      int4::linear(w, panel, panel + 1, activations, rows, [&](int p, int row, F16 out) {
        float lanes[kLanes];
        store(lanes, out);
        const int first = p * kLanes;
        std::memcpy(y + static_cast<size_t>(row) * w.n + first, lanes,
                    static_cast<size_t>(std::min(kLanes, w.n - first)) * sizeof(float));
      });
  }
}

}  // namespace

// Every quantise function returns the number of panels refused for a weight that is not finite or exceeds
// 1e38; 0 is success. `group` is a multiple of 32. Buffers have the sizes of linear_int4.h.
extern "C" {

int int4_quantize_panels(const uint16_t* weights, int n, int k, int group, uint8_t* out, int threads) {
  return quantize4(Panels{weights, n, k}, group, out, threads);
}

int int4_quantize_rows(const float* weights, int n, int k, int group, uint8_t* out, int threads) {
  return quantize4(Rows{weights, n, k, {}}, group, out, threads);
}

int int8_quantize_panels(const uint16_t* weights, int n, int k, int8_t* out, float* scale, int threads) {
  return quantize8(Panels{weights, n, k}, out, scale, threads);
}

int int8_quantize_rows(const float* weights, int n, int k, int8_t* out, float* scale, int threads) {
  return quantize8(Rows{weights, n, k, {}}, out, scale, threads);
}

// y (rows, n) = x (rows, k) W^T.
void int4_linear_rows(const uint8_t* weights, int n, int k, const float* x, int rows, float* y, int threads) {
  linear_rows(int4::Int4Weight{weights, n, k}, x, rows, y, threads);
}

void int8_linear_rows(const int8_t* weights, const float* scale, int n, int k, const float* x, int rows, float* y,
                      int threads) {
  linear_rows(int4::Int8Weight{weights, scale, n, k}, x, rows, y, threads);
}
}
