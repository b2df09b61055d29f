// The paged KV cache: (plane, page, kv head) holds 16 tokens' keys, then their values, all bf16.
//
// Keys stand transposed, (head_dim, 16): the lanes of a vector are the page's tokens. Values stand as they are,
// (16, head_dim). Both keep sixteen neighbours in the slot order of bf16_panels.h, which widens fastest.
#pragma once
#include <cstdint>

#include "bf16_panels.h"

namespace forward {

constexpr int kPageTokens = 16;

struct KvPages {
  simd::bf16* base;
  int64_t pages;
  int kv_heads, head_dim;

  simd::bf16* keys(int plane, int page, int head) const {
    const int64_t block = (static_cast<int64_t>(plane) * pages + page) * kv_heads + head;
    return base + block * 2 * kPageTokens * head_dim;
  }
  simd::bf16* values(int plane, int page, int head) const {
    return keys(plane, page, head) + kPageTokens * head_dim;
  }

  // `token` is its place in the page.
  void write_key(int plane, int page, int head, int token, const float* key) const {
    simd::bf16* k = keys(plane, page, head) + panels::slot(token);
    for (int d = 0; d < head_dim; ++d) k[d * kPageTokens] = simd::float_to_bf16(key[d]);
  }
  void write_value(int plane, int page, int head, int token, const float* value) const {
    simd::bf16* v = values(plane, page, head) + token * head_dim;
    for (int d = 0; d < head_dim; d += simd::kLanes)
      for (int lane = 0; lane < simd::kLanes; ++lane)
        v[d + panels::slot(lane)] = simd::float_to_bf16(value[d + lane]);
  }
};

}  // namespace forward
