// Rotary positions in the rotate-half convention: element i turns with element i + half.
#pragma once

namespace forward {

// Turns one head of 2 * half floats in place and multiplies it by `scale`.
inline void rotate(float* x, const float* cosine, const float* sine, int half, float scale) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = (a * cosine[i] - b * sine[i]) * scale;
    x[i + half] = (b * cosine[i] + a * sine[i]) * scale;
  }
}

}  // namespace forward
