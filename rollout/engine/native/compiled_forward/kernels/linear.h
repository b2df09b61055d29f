// One linear of a decoder, whatever its weights: the policy's bf16 panels, or a drafter's 4 or 8 bits.
#pragma once
#include <cstdint>

#include "linear_bf16.h"
#include "linear_int4.h"

namespace forward {

using simd::F16;

// Mirrors kernels/abi.py.
struct Linear {
  int32_t bits, n, k;
  const void* data;
  const float* scale;  // 8 bits only
  const float* bias;   // whole panels, or null

  bool quantized() const { return bits != 16; }
  int panels() const { return panels::count(n); }
};

// The input rows of a linear: floats always, and their 8-bit form where the linear is quantized.
struct Input {
  bf16::Activations floats;
  int4::Activations codes;
};

// Calls epi(panel, row, y) with the bias added, for panels [begin, end) and rows 0..rows-1.
template <class Epilogue>
inline void apply(const Linear& w, int begin, int end, const Input& in, int rows, Epilogue epi) {
  const float* bias = w.bias;
  auto biased = [bias, &epi](int panel, int row, F16 y) {
    epi(panel, row, bias ? simd::add(y, simd::load(bias + panel * panels::kColumns)) : y);
  };
  switch (w.bits) {
    case 4:
      return int4::linear(int4::Int4Weight{static_cast<const uint8_t*>(w.data), w.n, w.k}, begin, end, in.codes,
                          rows, biased);
    case 8:
      return int4::linear(int4::Int8Weight{static_cast<const int8_t*>(w.data), w.scale, w.n, w.k}, begin, end,
                          in.codes, rows, biased);
    default:
      return bf16::linear(bf16::Weight{static_cast<const simd::bf16*>(w.data), w.n, w.k}, begin, end, in.floats,
                          rows, biased);
  }
}

}  // namespace forward
