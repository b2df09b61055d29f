// One forward over ragged rows, in one parallel region. The order of its phases is run() below.
//
// A phase is split by rows, by panels of output columns or by attention heads; phases that read what another
// member wrote are a barrier apart. No split changes a result: each output is computed whole by one member.
#include <sys/mman.h>

#include <cstring>

#include "abi.h"
#include "attention.h"
#include "buffer.h"
#include "norm.h"
#include "rope.h"
#include "team.h"

namespace forward {

using team::Member;
using team::Range;

// Attention of one head costs about this many keys' worth beside its keys.
constexpr int kHeadOverheadKeys = 16;

// Rows of activations with their 8-bit form, of whatever width a linear takes.
struct Rows {
  Buffer<float> floats;
  size_t stride = 0;

  void reserve(int rows, int width) {
    stride = static_cast<size_t>(width);
    floats.reserve(rows * stride);
  }
  float* row(int m) const { return floats.get() + m * stride; }
};

struct Codes {
  Buffer<int8_t> q;
  Buffer<float> scale, scaled_sum;

  void reserve(int rows, int width) {
    const size_t count = static_cast<size_t>(rows);
    q.reserve(count * int4::padded(width));
    scale.reserve(count * int4::blocks(width));
    scaled_sum.reserve(count * int4::blocks(width));
  }
};

class Decoder {
 public:
  Decoder(const Model& model, team::Team* team)
      : model_(model), layers_(model.layer, model.layer + model.layers), team_(team) {
    model_.layer = layers_.data();
  }

  Status run(const Call& call) {
    if (!team_->usable()) return kForked;
    const Status status = check(call);
    if (status != kOk || call.rows == 0) return status;
    prepare(call);
    auto job = [&](const Member& me) {
      if (call.tokens) embed(call, me);
      for (int loop = call.loop_begin; loop < call.loop_end; ++loop)
        for (int layer = 0; layer < model_.layers; ++layer) block(call, me, loop, layer);
      finish(call, me);
    };
    team_->run(job);
    return kOk;
  }

 private:
  // ---- what must hold before any memory is touched

  Status check(const Call& call) const {
    for (int m = 0; call.tokens && m < call.rows; ++m)
      if (call.tokens[m] < 0 || call.tokens[m] >= model_.vocab) return kBadToken;
    for (int r = 0; r < call.head_rows; ++r)
      if (call.head_index[r] < 0 || call.head_index[r] >= call.rows) return kBadHeadRow;
    if (call.loop_begin >= call.loop_end) return kOk;
    for (int m = 0; m < call.rows; ++m) {
      const int position = call.positions[m];
      if (position < 0 || position >= model_.max_positions) return kBadPosition;
      if (call.table[m] < 0 || call.table[m] >= call.tables) return kBadPage;
      if (position / kPageTokens >= call.table_pages) return kBadPage;
      for (int p = first_key(position) / kPageTokens; p <= position / kPageTokens; ++p) {
        const int page = pages_of(call, m)[p];
        if (page < 0 || page >= call.kv_pages) return kBadPage;
      }
    }
    return kOk;
  }

  // ---- buffers and the split of attention, before the region

  void prepare(const Call& call) {
    const int rows = call.rows > call.head_rows ? call.rows : call.head_rows;
    const int attended = model_.query_heads * model_.head_dim;
    normed_.reserve(rows, model_.hidden);
    codes_.reserve(rows, widest());
    if (call.loop_begin >= call.loop_end) return;
    qkv_.reserve(rows, layers_[0].qkv.panels() * panels::kColumns);
    attended_.reserve(rows, attended);
    gated_.reserve(rows, layers_[0].gate_up.panels() / 2 * panels::kColumns);
    int longest = 0;
    for (int m = 0; m < rows; ++m) longest = call.positions[m] > longest ? call.positions[m] : longest;
    score_stride_ = static_cast<size_t>(longest / kPageTokens + 1) * kPageTokens;
    scores_.reserve(score_stride_ * kMaxGroup * team_->size());
    split_attention(call);
  }

  int widest() const {
    const Layer& l = layers_[0];
    int k = model_.hidden;
    for (const Linear* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) k = w->k > k ? w->k : k;
    return k;
  }

  // cuts_[t]..cuts_[t+1] are the (row, query head) pairs of member t: contiguous, of near equal cost.
  void split_attention(const Call& call) {
    const int members = team_->size(), heads = model_.query_heads;
    int64_t total = 0;
    for (int m = 0; m < call.rows; ++m) total += cost(call.positions[m]);
    cuts_.assign(members + 1, call.rows * heads);
    cuts_[0] = 0;
    int64_t done = 0;
    int next = 1;
    for (int m = 0; m < call.rows && next < members; ++m) {
      const int64_t each = cost(call.positions[m]);
      while (next < members && (done + each) * heads * members >= total * heads * next) {
        const int64_t missing = total * heads * next / members - done * heads;
        int inside = static_cast<int>((missing + each / 2) / each);
        inside = inside < 0 ? 0 : inside > heads ? heads : inside;
        cuts_[next++] = m * heads + inside;
      }
      done += each;
    }
  }

  int64_t cost(int position) const { return position - first_key(position) + 1 + kHeadOverheadKeys; }

  int first_key(int position) const {
    return model_.window > 0 && position >= model_.window ? position - model_.window + 1 : 0;
  }

  static const int32_t* pages_of(const Call& call, int m) {
    return call.page_table + static_cast<int64_t>(call.table[m]) * call.table_pages;
  }

  // ---- phases; each is run by every member

  float* hidden(const Call& call, int m) const { return call.hidden + static_cast<size_t>(m) * model_.hidden; }

  void embed(const Call& call, const Member& me) const {
    const Range mine = me.share(call.rows);
    for (int m = mine.begin; m < mine.end; ++m) {
      const simd::bf16* from = model_.embedding + static_cast<size_t>(call.tokens[m]) * model_.hidden;
      for (int i = 0; i < model_.hidden; i += simd::kLanes)
        simd::store(hidden(call, m) + i, simd::load_bf16(from + i));
    }
    copy_tap(call, me, call.embed_tap);
  }

  void block(const Call& call, const Member& me, int loop, int layer) {
    const Layer& w = layers_[layer];
    const int plane = loop * model_.layers + layer;
    norm(call, me, w.input_norm, w.qkv);
    me.wait();
    project(call, me, w.qkv);
    me.wait();
    turn_and_write(call, me, w, plane);
    me.wait();
    attend_share(call, me, plane);
    me.wait();
    encode(me, attended_, call.rows, w.o, true);
    add_to_hidden(call, me, w.o, attended_);
    me.wait();
    norm(call, me, w.post_norm, w.gate_up);
    me.wait();
    gate(call, me, w.gate_up);
    me.wait();
    encode(me, gated_, call.rows, w.down, true);
    add_to_hidden(call, me, w.down, gated_);
    me.wait();
    if (call.layer_taps) copy_tap(call, me, call.layer_taps[plane - call.loop_begin * model_.layers]);
  }

  void norm(const Call& call, const Member& me, const float* weight, const Linear& next) {
    const Range mine = me.share(call.rows);
    for (int m = mine.begin; m < mine.end; ++m)
      rms_norm(hidden(call, m), weight, model_.hidden, model_.eps, normed_.row(m));
    encode(me, normed_, call.rows, next, false);
  }

  // Rounds this member's rows to 8 bits if `next` wants that. With `shared`, columns of a row came from all
  // members, and all members are about to read them all.
  void encode(const Member& me, const Rows& rows, int count, const Linear& next, bool shared) {
    if (!next.quantized()) return;
    const Range mine = me.share(count);
    const size_t width = int4::padded(next.k), blocks = int4::blocks(next.k);
    for (int m = mine.begin; m < mine.end; ++m)
      int4::quantize_row(rows.row(m), next.k, codes_.q.get() + m * width, codes_.scale.get() + m * blocks,
                         codes_.scaled_sum.get() + m * blocks);
    if (shared) me.wait();
  }

  Input input(const Rows& rows, const Linear& w) const {
    return {{rows.row(0), rows.stride}, {codes_.q.get(), codes_.scale.get(), codes_.scaled_sum.get(), w.k}};
  }

  void project(const Call& call, const Member& me, const Linear& w) {
    const Range mine = me.share(w.panels());
    apply(w, mine.begin, mine.end, input(normed_, w), call.rows, [this](int panel, int row, F16 y) {
      simd::store(qkv_.row(row) + panel * panels::kColumns, y);
    });
  }

  void turn_and_write(const Call& call, const Member& me, const Layer& w, int plane) {
    const int dim = model_.head_dim, half = dim / 2;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const KvPages kv = pages(call);
    const Range mine = me.share(call.rows);
    for (int m = mine.begin; m < mine.end; ++m) {
      const int position = call.positions[m];
      const float* cosine = model_.cosine + static_cast<size_t>(position) * half;
      const float* sine = model_.sine + static_cast<size_t>(position) * half;
      float* query = qkv_.row(m);
      float* key = query + model_.query_heads * dim;
      const float* value = key + model_.kv_heads * dim;
      for (int h = 0; h < model_.query_heads; ++h, query += dim) {
        if (w.query_norm) rms_norm(query, w.query_norm, dim, model_.eps, query);
        rotate(query, cosine, sine, half, scale);
      }
      const int page = pages_of(call, m)[position / kPageTokens];
      for (int h = 0; h < model_.kv_heads; ++h, key += dim, value += dim) {
        if (w.key_norm) rms_norm(key, w.key_norm, dim, model_.eps, key);
        rotate(key, cosine, sine, half, 1.0f);
        kv.write(plane, page, h, position % kPageTokens, key, value);
      }
    }
  }

  KvPages pages(const Call& call) const { return {call.kv, call.kv_pages, model_.kv_heads, model_.head_dim}; }

  void attend_share(const Call& call, const Member& me, int plane) {
    const int heads = model_.query_heads, group = heads / model_.kv_heads;
    const KvPages kv = pages(call);
    float* scores = scores_.get() + me.index * kMaxGroup * score_stride_;
    for (int item = cuts_[me.index]; item < cuts_[me.index + 1];) {
      const int m = item / heads, head = item % heads;
      int count = group - head % group;
      count = item + count > cuts_[me.index + 1] ? cuts_[me.index + 1] - item : count;
      const int position = call.positions[m];
      const KeyRange range{&kv, pages_of(call, m), plane, head / group, first_key(position), position};
      const size_t at = static_cast<size_t>(head) * model_.head_dim;
      attend(qkv_.row(m) + at, count, range, scores, score_stride_, attended_.row(m) + at);
      item += count;
    }
  }

  void add_to_hidden(const Call& call, const Member& me, const Linear& w, const Rows& from) {
    const Range mine = me.share(w.panels());
    apply(w, mine.begin, mine.end, input(from, w), call.rows, [this, &call](int panel, int row, F16 y) {
      float* x = hidden(call, row) + panel * panels::kColumns;
      simd::store(x, simd::add(simd::load(x), y));
    });
  }

  // Panels come in pairs, gate then up; the gate waits in the pair's output until its up arrives.
  void gate(const Call& call, const Member& me, const Linear& w) {
    const Range mine = me.share(w.panels() / 2);
    apply(w, 2 * mine.begin, 2 * mine.end, input(normed_, w), call.rows, [this](int panel, int row, F16 y) {
      float* out = gated_.row(row) + panel / 2 * panels::kColumns;
      simd::store(out, panel % 2 == 0 ? y : gated(simd::load(out), y));
    });
  }

  void copy_tap(const Call& call, const Member& me, float* tap) const {
    if (!tap) return;
    const Range mine = me.share(call.rows);
    const size_t width = model_.hidden;
    std::memcpy(tap + mine.begin * width, hidden(call, mine.begin), (mine.end - mine.begin) * width * sizeof(float));
  }

  void finish(const Call& call, const Member& me) {
    const size_t width = model_.hidden;
    if (call.final_tap) {
      const Range mine = me.share(call.rows);
      for (int m = mine.begin; m < mine.end; ++m)
        rms_norm(hidden(call, m), model_.final_norm, model_.hidden, model_.eps, call.final_tap + m * width);
    }
    if (call.head_rows == 0) return;
    const Linear& w = model_.head;
    if (call.loop_begin >= call.loop_end) me.wait();  // rows of an embedding alone are not shared yet
    const Range mine = me.share(call.head_rows);
    for (int r = mine.begin; r < mine.end; ++r)
      rms_norm(hidden(call, call.head_index[r]), model_.final_norm, model_.hidden, model_.eps, normed_.row(r));
    encode(me, normed_, call.head_rows, w, false);
    me.wait();
    const Range columns = me.share(w.panels());
    apply(w, columns.begin, columns.end, input(normed_, w), call.head_rows, [&](int panel, int row, F16 y) {
      const int column = panel * panels::kColumns;
      float* out = call.logits + static_cast<size_t>(row) * w.n + column;
      if (column + panels::kColumns <= w.n) return simd::store(out, y);
      float lanes[simd::kLanes];
      simd::store(lanes, y);
      std::memcpy(out, lanes, (w.n - column) * sizeof(float));
    });
  }

  Model model_;
  std::vector<Layer> layers_;
  team::Team* team_;
  Rows normed_, qkv_, attended_, gated_;
  Codes codes_;
  Buffer<float> scores_;
  size_t score_stride_ = 0;
  std::vector<int> cuts_;
};

}  // namespace forward

#define TAILDRAFT_API extern "C" __attribute__((visibility("default")))

TAILDRAFT_API const char* taildraft_isa() {
#if defined(TAILDRAFT_GENERIC)
  return "generic";
#elif defined(__AVX512F__) && !defined(TAILDRAFT_AVX2)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "generic";
#endif
}

// Null when threads or memory are refused.
TAILDRAFT_API void* taildraft_team_new(int threads) {
  try {
    return new team::Team(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

TAILDRAFT_API void taildraft_team_free(void* team) { delete static_cast<team::Team*>(team); }

TAILDRAFT_API void* taildraft_decoder_new(const forward::Model* model, void* team) {
  try {
    return new forward::Decoder(*model, static_cast<team::Team*>(team));
  } catch (const std::exception&) {
    return nullptr;
  }
}

TAILDRAFT_API void taildraft_decoder_free(void* decoder) { delete static_cast<forward::Decoder*>(decoder); }

TAILDRAFT_API int taildraft_forward(void* decoder, const forward::Call* call) {
  try {
    return static_cast<forward::Decoder*>(decoder)->run(*call);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

// Packs rows (n, k): its panel p becomes panel first + p * every of `out`.
TAILDRAFT_API int taildraft_pack(void* team, const uint16_t* rows, int n, int k, uint16_t* out, int first, int every) {
  team::Team* members = static_cast<team::Team*>(team);
  if (!members->usable()) return forward::kForked;
  auto job = [&](const team::Member& me) {
    const team::Range mine = me.share(panels::count(n));
    for (int p = mine.begin; p < mine.end; ++p)
      panels::pack_panel(rows, n, k, p, out + panels::offset(first + p * every, 0, k));
  };
  members->run(job);
  return forward::kOk;
}

// Asks for huge pages under memory not touched yet: a forward walks all of it, page by page. A refusal is fine.
TAILDRAFT_API void taildraft_advise(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
