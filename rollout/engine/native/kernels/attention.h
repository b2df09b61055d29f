// Attention of one row: a few query heads that share a KV head, over the keys of their own sequence.
//
// Scores, maximum, sum and weighted values run in the order of key positions, page by page, and each query
// head has its own chains. So a head's bits depend on its query and its keys alone: not on the other heads
// computed beside it, nor on rows, chunks or page numbers. Keys past the row's position are never used.
#pragma once
#include "kv_pages.h"
#include "vecmath.h"

namespace forward {

using simd::F16;

// Query heads computed together: two registers of accumulator each.
constexpr int kMaxGroup = 4;

// Score of a masked key: under any real score, and its exponential is zero.
constexpr float kMasked = -1e30f;

// One row's view of its sequence.
struct KeyRange {
  const KvPages* kv;
  const int32_t* table;
  int plane, head;
  int first, last;  // key positions read, both included

  int first_page() const { return first / kPageTokens; }
  int last_page() const { return last / kPageTokens; }
  const simd::bf16* keys(int page) const { return kv->keys(plane, table[page], head); }
  const simd::bf16* values(int page) const { return kv->values(plane, table[page], head); }
};

namespace attention {

inline F16 lane_numbers() {
  const float numbers[simd::kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return simd::load(numbers);
}

// Scores of U pages from `page` on, for G heads; a head's scores start at its first page.
template <int G, int U>
inline void score_pages(const float* query, const KeyRange& range, int page, float* scores, size_t stride) {
  const int head_dim = range.kv->head_dim;
  const simd::bf16* keys[U];
  for (int u = 0; u < U; ++u) keys[u] = range.keys(page + u);
  const simd::bf16* next = range.keys(page + U <= range.last_page() ? page + U : page);
  F16 acc[G][U];
  for (int g = 0; g < G; ++g)
    for (int u = 0; u < U; ++u) acc[g][u] = simd::zero();
  for (int d = 0; d < head_dim; d += 2) {
    __builtin_prefetch(next + d * kPageTokens);
#pragma GCC unroll 2
    for (int i = d; i < d + 2; ++i)
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        F16 k = panels::load(keys[u] + i * kPageTokens);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[g][u] = simd::fma(k, simd::splat(query[g * head_dim + i]), acc[g][u]);
      }
  }
  float* out = scores + (page - range.first_page()) * kPageTokens;
  for (int g = 0; g < G; ++g)
    for (int u = 0; u < U; ++u) simd::store(out + g * stride + u * kPageTokens, acc[g][u]);
}

// Masks the lanes outside the range, replaces scores by exp(score - max) and returns the sum of those.
inline float softmax(const KeyRange& range, float* scores) {
  const int pages = range.last_page() - range.first_page() + 1;
  const F16 lanes = lane_numbers(), masked = simd::splat(kMasked);
  const float before = static_cast<float>(range.first % kPageTokens);
  const float kept = static_cast<float>(range.last % kPageTokens + 1);
  simd::store(scores, simd::where_less(lanes, simd::splat(before), masked, simd::load(scores)));
  float* last = scores + (pages - 1) * kPageTokens;
  simd::store(last, simd::where_less(lanes, simd::splat(kept), simd::load(last), masked));
  F16 top = masked;
  for (int p = 0; p < pages; ++p) top = simd::max(top, simd::load(scores + p * kPageTokens));
  const F16 most = simd::splat(simd::max_lane(top));
  F16 total = simd::zero();
  for (int p = 0; p < pages; ++p) {
    F16 e = vecmath::exp(simd::sub(simd::load(scores + p * kPageTokens), most));
    simd::store(scores + p * kPageTokens, e);
    total = simd::add(total, e);
  }
  return simd::sum(total);
}

// Weighted values of dimensions [16 * chunk, 16 * (chunk + C)).
template <int G, int C>
inline void weigh(const KeyRange& range, const float* weights, size_t stride, const float* inverse, int chunk,
                  float* out) {
  const int head_dim = range.kv->head_dim;
  F16 acc[G][C];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) acc[g][c] = simd::zero();
  for (int page = range.first_page(); page <= range.last_page(); ++page) {
    const int start = page * kPageTokens;
    const int begin = range.first > start ? range.first - start : 0;
    const int end = range.last - start + 1 < kPageTokens ? range.last - start + 1 : kPageTokens;
    const simd::bf16* values = range.values(page) + chunk * simd::kLanes;
    const simd::bf16* next =
        range.values(page < range.last_page() ? page + 1 : page) + chunk * simd::kLanes;
    const float* w = weights + start - range.first_page() * kPageTokens;
    for (int j = begin; j < end; ++j) {
      __builtin_prefetch(next + j * head_dim);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        // Reads the weights anew for every chunk: held in registers, they would push accumulators out of them.
        if (G * C > 4) asm("" ::: "memory");
        F16 v = panels::load(values + j * head_dim + c * simd::kLanes);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[g][c] = simd::fma(v, simd::splat(w[g * stride + j]), acc[g][c]);
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c)
      simd::store(out + g * head_dim + (chunk + c) * simd::kLanes, simd::mul(acc[g][c], simd::splat(inverse[g])));
}

template <int G>
inline void heads(const float* query, const KeyRange& range, float* scores, size_t stride, float* out) {
  // As many chains side by side as registers allow.
  constexpr int kPages = G == 1 ? 4 : G == 2 ? 2 : 1;
  constexpr int kChunks = G == 1 ? 4 : G == 4 ? 1 : 2;
  int page = range.first_page();
  for (; page + kPages - 1 <= range.last_page(); page += kPages)
    score_pages<G, kPages>(query, range, page, scores, stride);
  for (; page <= range.last_page(); ++page) score_pages<G, 1>(query, range, page, scores, stride);
  float inverse[G];
  for (int g = 0; g < G; ++g) inverse[g] = 1.0f / softmax(range, scores + g * stride);
  const int chunks = range.kv->head_dim / simd::kLanes;
  int chunk = 0;
  for (; chunk + kChunks <= chunks; chunk += kChunks) weigh<G, kChunks>(range, scores, stride, inverse, chunk, out);
  for (; chunk < chunks; ++chunk) weigh<G, 1>(range, scores, stride, inverse, chunk, out);
}

}  // namespace attention

// `count` query heads of one KV head, (count, head_dim) in and out, queries scaled. `scores` is scratch of
// kMaxGroup rows of `stride` floats, each long enough for the pages of the range.
inline void attend(const float* query, int count, const KeyRange& range, float* scores, size_t stride, float* out) {
  const int head_dim = range.kv->head_dim;
  for (int done = 0; done < count;) {
    const int group = count - done < kMaxGroup ? count - done : kMaxGroup;
    const float* q = query + done * head_dim;
    float* o = out + done * head_dim;
    switch (group) {
      case 1: attention::heads<1>(q, range, scores, stride, o); break;
      case 2: attention::heads<2>(q, range, scores, stride, o); break;
      case 3: attention::heads<3>(q, range, scores, stride, o); break;
      default: attention::heads<4>(q, range, scores, stride, o);
    }
    done += group;
  }
}

}  // namespace forward
