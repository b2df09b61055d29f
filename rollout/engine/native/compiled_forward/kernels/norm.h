// Root mean square norm of one row, adding a row to another, and the gated unit of the MLP.
#pragma once
#include <cmath>

#include "simd.h"
#include "vecmath.h"

namespace forward {

using simd::F16;

// out = x / sqrt(mean(x^2) + eps) * weight; n is a multiple of 16. x and out may be the same.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  F16 squares = simd::zero();
  for (int i = 0; i < n; i += simd::kLanes) {
    F16 v = simd::load(x + i);
    squares = simd::fma(v, v, squares);
  }
  const F16 factor = simd::splat(1.0f / std::sqrt(simd::sum(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += simd::kLanes)
    simd::store(out + i, simd::mul(simd::mul(simd::load(x + i), factor), simd::load(weight + i)));
}

// out += x; n is a multiple of 16.
inline void add_row(const float* x, int n, float* out) {
  for (int i = 0; i < n; i += simd::kLanes) simd::store(out + i, simd::add(simd::load(out + i), simd::load(x + i)));
}

// gate / (1 + e^-gate) * up
inline F16 gated(F16 gate, F16 up) {
  F16 one = simd::splat(1.0f);
  F16 silu = simd::div(gate, simd::add(one, vecmath::exp(simd::sub(simd::zero(), gate))));
  return simd::mul(silu, up);
}

}  // namespace forward
