// Attention of one row and one KV head, chunk by chunk: all query heads that share the KV head at once.
//
// Keys are taken in chunks of a fixed number of positions, counted from position 0. A chunk is computed by itself
// (`attend_chunk`), in the order of positions, and chunks are folded one after the other from the first on
// (`fold`). Each query head has its own chains. So a head's bits depend on its query, its keys and its position
// alone: not on the heads or rows computed beside it, on page numbers, or on who computed which chunk.
#pragma once
#include "kv_pages.h"
#include "vecmath.h"

namespace forward {

using simd::F16;

// Query heads computed together: as many as leave registers for two vectors of each.
constexpr int kMaxGroup = 4;

// Keys and values of a chunk take half a core's smallest second-level cache at most, its scores a corner of the
// first. Longer chunks would be folded less often, shorter ones split a long context more evenly.
constexpr int kChunkPages = 8;
constexpr int kChunkKeys = kChunkPages * kPageTokens;

// Score of a masked key: under any real score, and its exponential is zero.
constexpr float kMasked = -1e30f;

// Keys of one chunk that one row reads.
struct ChunkKeys {
  const simd::bf16* page[kChunkPages];   // keys of each page; its values follow them
  const simd::bf16* ahead[kChunkPages];  // pages that will be read next, to be fetched meanwhile
  int pages;
  int first, last;  // positions read, both included, counted from the first page's first token
  int head_dim;

  const simd::bf16* values(const simd::bf16* keys) const { return keys + kPageTokens * head_dim; }
};

// What is known of some query heads after some keys: (heads, head_dim) values weighted by exp(score - top), the
// top score per head, and the sum of those weights.
struct Partial {
  float *values, *top, *total;

  static int lanes(int heads) { return (heads + simd::kLanes - 1) / simd::kLanes * simd::kLanes; }
  static size_t floats(int heads, int head_dim) {
    return static_cast<size_t>(heads) * head_dim + 2 * static_cast<size_t>(lanes(heads));
  }
  // The one that stands at `floats`.
  static Partial at(float* floats, int heads, int head_dim) {
    float* top = floats + static_cast<size_t>(heads) * head_dim;
    return {floats, top, top + lanes(heads)};
  }
};

namespace attention {

inline F16 lane_numbers() {
  const float numbers[simd::kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return simd::load(numbers);
}

// Keeps the compiler from knowing that what it read from memory still stands there: read anew, a value needs no
// register meanwhile, and accumulators keep theirs.
inline void anew() { asm volatile("" ::: "memory"); }

// Scores of U pages from `page` on, for G heads, kChunkKeys apart.
template <int G, int U>
inline void score_pages(const float* query, const ChunkKeys& chunk, int page, float* scores) {
  const int head_dim = chunk.head_dim;
  const simd::bf16* keys[U];
  for (int u = 0; u < U; ++u) keys[u] = chunk.page[page + u];
  F16 acc[G][U];
  for (int g = 0; g < G; ++g)
    for (int u = 0; u < U; ++u) acc[g][u] = simd::zero();
  // One page ahead is fetched in each of U equal parts of the dimensions, spread evenly.
  const int part = head_dim / U;
  for (int fetched = 0; fetched < U; ++fetched) {
    const simd::bf16* ahead = chunk.ahead[page + fetched];
#pragma GCC unroll 4
    for (int d = fetched * part; d < (fetched + 1) * part; ++d) {
      for (int line = 0; line < U; line += 2) __builtin_prefetch(ahead + line * kPageTokens);
      ahead += U * kPageTokens;
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        if (G * U > 4) anew();
        const F16 k = panels::load(keys[u] + d * kPageTokens);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[g][u] = simd::fma(k, simd::splat(query[g * head_dim + d]), acc[g][u]);
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int u = 0; u < U; ++u) simd::store(scores + g * kChunkKeys + (page + u) * kPageTokens, acc[g][u]);
}

// Masks the lanes outside the chunk's positions, replaces scores by exp(score - top), and says top and sum. The heads
// go side by side: alone, each would wait for its own sums over lanes.
template <int G>
inline void softmax(const ChunkKeys& chunk, float* scores, float* top, float* total) {
  const F16 lanes = lane_numbers(), masked = simd::splat(kMasked);
  const F16 first = simd::splat(static_cast<float>(chunk.first));
  const F16 kept = simd::splat(static_cast<float>(chunk.last % kPageTokens + 1));
  F16 most[G], sum[G];
  for (int g = 0; g < G; ++g) {
    float *begin = scores + g * kChunkKeys, *last = begin + (chunk.pages - 1) * kPageTokens;
    simd::store(begin, simd::where_less(lanes, first, masked, simd::load(begin)));
    simd::store(last, simd::where_less(lanes, kept, simd::load(last), masked));
    most[g] = masked;
  }
  for (int p = 0; p < chunk.pages; ++p)
    for (int g = 0; g < G; ++g)
      most[g] = simd::max(most[g], simd::load(scores + g * kChunkKeys + p * kPageTokens));
  for (int g = 0; g < G; ++g) {
    top[g] = simd::max_lane(most[g]);
    most[g] = simd::splat(top[g]);
    sum[g] = simd::zero();
  }
  for (int p = 0; p < chunk.pages; ++p) {
    for (int g = 0; g < G; ++g) {
      float* score = scores + g * kChunkKeys + p * kPageTokens;
      const F16 e = vecmath::exp(simd::sub(simd::load(score), most[g]));
      simd::store(score, e);
      sum[g] = simd::add(sum[g], e);
    }
  }
  for (int g = 0; g < G; ++g) total[g] = simd::sum(sum[g]);
}

// Adds one page's tokens [begin, end) to dimensions [16 * vector, 16 * (vector + C)) of G heads.
template <int G, int C>
inline void add_values(const float* weights, const simd::bf16* values, const simd::bf16* ahead, int begin, int end,
                       int head_dim, int vector, float* out) {
  const int from = vector * simd::kLanes;
  F16 acc[G][C];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[g][c] = simd::load(out + g * head_dim + from + c * simd::kLanes);
#pragma GCC unroll 4
  for (int j = begin; j < end; ++j) {
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) __builtin_prefetch(ahead + j * head_dim + from + c * simd::kLanes);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      if (G * C > 4) anew();
      const F16 v = panels::load(values + j * head_dim + from + c * simd::kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[g][c] = simd::fma(v, simd::splat(weights[g * kChunkKeys + j]), acc[g][c]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) simd::store(out + g * head_dim + from + c * simd::kLanes, acc[g][c]);
}

// Weighted values of G heads, page by page, so that each is read once and in order.
template <int G>
inline void weigh(const ChunkKeys& chunk, const float* weights, float* out) {
  constexpr int kVectors = G == 1 ? 4 : G == 4 ? 1 : 2;
  const int head_dim = chunk.head_dim, vectors = head_dim / simd::kLanes;
  for (int i = 0; i < G * head_dim; i += simd::kLanes) simd::store(out + i, simd::zero());
  for (int page = 0; page < chunk.pages; ++page) {
    const int start = page * kPageTokens;
    const int begin = page == 0 ? chunk.first : 0;
    const int end = page == chunk.pages - 1 ? chunk.last - start + 1 : kPageTokens;
    const simd::bf16 *values = chunk.values(chunk.page[page]), *ahead = chunk.values(chunk.ahead[page]);
    int v = 0;
    for (; v + kVectors <= vectors; v += kVectors)
      add_values<G, kVectors>(weights + start, values, ahead, begin, end, head_dim, v, out);
    for (; v < vectors; ++v) add_values<G, 1>(weights + start, values, ahead, begin, end, head_dim, v, out);
  }
}

template <int G>
inline void heads(const float* query, const ChunkKeys& chunk, float* values, float* top, float* total) {
  // As many chains side by side as registers allow.
  constexpr int kPages = G == 1 ? 4 : G == 4 ? 1 : 2;
  alignas(64) float scores[G * kChunkKeys];
  int page = 0;
  for (; page + kPages <= chunk.pages; page += kPages) score_pages<G, kPages>(query, chunk, page, scores);
  for (; page < chunk.pages; ++page) score_pages<G, 1>(query, chunk, page, scores);
  softmax<G>(chunk, scores, top, total);
  weigh<G>(chunk, scores, values);
}

}  // namespace attention

// What `count` query heads, (count, head_dim) and scaled, make of one chunk.
inline void attend_chunk(const float* query, int count, const ChunkKeys& chunk, const Partial& out) {
  for (int done = 0; done < count; done += kMaxGroup) {
    const float* q = query + done * chunk.head_dim;
    float *values = out.values + done * chunk.head_dim, *top = out.top + done, *total = out.total + done;
    switch (count - done) {
      case 1: attention::heads<1>(q, chunk, values, top, total); break;
      case 2: attention::heads<2>(q, chunk, values, top, total); break;
      case 3: attention::heads<3>(q, chunk, values, top, total); break;
      default: attention::heads<4>(q, chunk, values, top, total);
    }
  }
  for (int g = count; g < Partial::lanes(count); ++g) out.top[g] = out.total[g] = 0.0f;
}

// Adds what the next chunk makes to what all chunks before it make.
inline void fold(const Partial& into, const Partial& next, int count, int head_dim) {
  for (int first = 0; first < count; first += simd::kLanes) {
    const F16 top = simd::max(simd::load(into.top + first), simd::load(next.top + first));
    const F16 keep = vecmath::exp(simd::sub(simd::load(into.top + first), top));
    const F16 take = vecmath::exp(simd::sub(simd::load(next.top + first), top));
    const F16 kept = simd::mul(simd::load(into.total + first), keep);
    simd::store(into.total + first, simd::fma(simd::load(next.total + first), take, kept));
    simd::store(into.top + first, top);
    float keeps[simd::kLanes], takes[simd::kLanes];
    simd::store(keeps, keep);
    simd::store(takes, take);
    for (int g = first; g < count && g < first + simd::kLanes; ++g) {
      const F16 a = simd::splat(keeps[g - first]), b = simd::splat(takes[g - first]);
      float* x = into.values + g * head_dim;
      const float* y = next.values + g * head_dim;
      for (int d = 0; d < head_dim; d += simd::kLanes)
        simd::store(x + d, simd::fma(simd::load(y + d), b, simd::mul(simd::load(x + d), a)));
    }
  }
}

// The heads' outputs, (count, head_dim), once every chunk was folded.
inline void finish(const Partial& all, int count, int head_dim, float* out) {
  for (int g = 0; g < count; ++g) {
    const F16 inverse = simd::splat(1.0f / all.total[g]);
    for (int d = 0; d < head_dim; d += simd::kLanes)
      simd::store(out + g * head_dim + d, simd::mul(simd::load(all.values + g * head_dim + d), inverse));
  }
}

}  // namespace forward
