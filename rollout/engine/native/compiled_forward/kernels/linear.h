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

// Asks for a panel that is about to be read: few panels here and there come at the speed of memory only if several
// are on their way at a time.
inline void fetch_panel(const Linear& w, int panel) {
  const size_t bytes = w.bits == 4   ? int4::panel_bytes4(w.k)
                       : w.bits == 8 ? int4::panel_bytes8(w.k)
                                     : static_cast<size_t>(w.k) * panels::kColumns * sizeof(simd::bf16);
  const char* from = static_cast<const char*>(w.data) + panel * bytes;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

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
