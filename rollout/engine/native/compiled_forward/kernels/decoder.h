// One forward over ragged rows, in one parallel region. The order of its phases is run() below.
//
// Keys and values of a layer are made of what the layer before it left. So where only head rows are wanted, all
// other rows end in the last layer with writing theirs: no query, attention, output or MLP. Most rows of prompts are
// such. The head rows go through the rest of that layer as a smaller call of their own (kept_rows.h).
//
// A phase is split by rows, by panels of output columns or by pieces of attention; phases that read what another
// member wrote are a barrier apart. No split changes a result: its parts are fixed, and summed in a fixed order.
#pragma once
#include <cstring>
#include <vector>

#include "abi.h"
#include "attention_work.h"
#include "buffer.h"
#include "kept_rows.h"
#include "norm.h"
#include "phases.h"
#include "rope.h"
#include "team.h"

namespace forward {

using team::Member;
using team::Range;

// Up to so many rows every member prepares the whole input of a linear for itself: cheaper than a barrier.
constexpr int kAloneRows = 4;

// What a member takes of a linear at a time: a multiple of the panels that few rows need side by side, and far
// more work than the claim itself.
constexpr int kPanelsDealt = 4;
constexpr int kHeadPanelsDealt = 32;

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

// What a linear reads: a norm's output, and the 8-bit form of whatever comes next. Members share the first one
// or, when rows are few, have one each.
struct Prepared {
  Rows normed;
  Codes codes;
};

class Decoder {
 public:
  Decoder(const Model& model, team::Team* team)
      : model_(model),
        layers_(model.layer, model.layer + model.layers),
        team_(team),
        queries_{0, model.query_heads},
        heads_{0, model.query_heads + 2 * model.kv_heads},
        prepared_(team->size()) {
    model_.layer = layers_.data();
  }

  Status run(const Call& call) {
    if (!team_->usable()) return kForked;
    watch_.start();
    const Status status = check(call);
    if (status != kOk || call.rows == 0) return status;
    prepare(call);
    auto job = [&](const Member& me) {
      if (call.tokens) embed(call, me);  // ends with the rows ready for every member
      copy_tap(call, me, call.embed_tap);
      const int whole_loops = ends_early(call) ? call.loop_end - 1 : call.loop_end;
      for (int loop = call.loop_begin; loop < whole_loops; ++loop) {
        for (int layer = call.layer_begin; layer < call.layer_end; ++layer)
          block(call, me, attention_, heads_, loop, layer);
        if (ends_loops(call)) close_loop(call, me, loop);
      }
      if (ends_early(call)) return end_early(call, me);
      finish(call, me);
    };
    team_->run(job);
    watch_.lap(call.head_rows ? phases::kHead : phases::kRest);
    if (call.phase_s) watch_.seconds(call.phase_s);
    return kOk;
  }

  // The head's own logits of some tokens of a head row, after a call whose logits were the screen's.
  void look_again(int row, const int32_t* tokens, int count, float* logits) const {
    const Linear& w = model_.head;
    const Prepared& own = prepared_[0];
    const size_t r = static_cast<size_t>(row), blocks = int4::blocks(w.k);
    const Input in{{own.normed.row(row), own.normed.stride},
                   {own.codes.q.get() + r * int4::padded(w.k), own.codes.scale.get() + r * blocks,
                    own.codes.scaled_sum.get() + r * blocks, w.k}};
    for (int i = 0; i < count; ++i) {
      const int panel = tokens[i] / panels::kColumns;
      apply(w, panel, panel + 1, in, 1, [&](int, int, F16 y) {
        float lanes[simd::kLanes];
        simd::store(lanes, y);
        logits[i] = lanes[tokens[i] % panels::kColumns];
      });
    }
  }

  // Of a hidden state, in floats.
  int width() const { return model_.hidden; }
  int vocab() const { return model_.vocab; }

 private:
  void lap(const Member& me, phases::Phase phase) {
    if (me.index == 0) watch_.lap(phase);
  }

  // ---- what must hold before any memory is touched

  Status check(const Call& call) const {
    if (call.loop_begin < 0 || call.loop_end > model_.loops) return kBadLoop;
    for (int m = 0; call.row_loop && m < call.rows; ++m)
      if (call.row_loop[m] < 0 || call.row_loop[m] >= model_.loops) return kBadLoop;
    for (int m = 0; m < call.rows; ++m)
      if (starts_at_token(call, m) && (call.tokens[m] < 0 || call.tokens[m] >= model_.vocab)) return kBadToken;
    for (int r = 0; r < call.head_rows; ++r)
      if (call.head_index[r] < 0 || call.head_index[r] >= call.rows) return kBadHeadRow;
    if (call.loop_begin >= call.loop_end) return kOk;
    if (!layers_fit(call)) return kBadLayers;
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

  bool layers_fit(const Call& call) const {
    if (call.layer_begin < 0 || call.layer_begin >= call.layer_end || call.layer_end > model_.layers) return false;
    const bool some = call.layer_end - call.layer_begin < model_.layers;
    return !(some && call.loop_end - call.loop_begin > 1) && (ends_loops(call) || call.head_rows == 0);
  }

  // Whether a loop's last layer is run: else rows end with the residual stream, which a call of later layers takes on.
  bool ends_loops(const Call& call) const { return call.layer_end == model_.layers; }

  // Whether rows without a head are of no use once their last keys are written.
  static bool ends_early(const Call& call) {
    const bool taps = call.layer_taps || call.loop_taps || call.final_tap;
    return call.heads_only && call.head_rows < call.rows && call.loop_begin < call.loop_end && !call.row_loop && !taps;
  }

  // ---- buffers and the pieces of attention, before the region

  void prepare(const Call& call) {
    const int rows = call.rows > call.head_rows ? call.rows : call.head_rows;
    const int attended = model_.query_heads * model_.head_dim;
    const int width = widest();
    for (int i = 0; i < team_->size(); ++i) {
      const int prepared = i == 0 || rows < kAloneRows ? rows : kAloneRows;
      prepared_[i].normed.reserve(prepared, model_.hidden);
      prepared_[i].codes.reserve(prepared, width);
    }
    if (call.loop_begin >= call.loop_end) return;
    qkv_.reserve(rows, layers_[0].qkv.panels() * panels::kColumns);
    attended_.reserve(rows, attended);
    gated_.reserve(rows, layers_[0].gate_up.panels() / 2 * panels::kColumns);
    if (layers_[0].attention_out_norm) branch_.reserve(rows, model_.hidden);
    plan_attention(call, attention_);
    if (!ends_early(call)) return;
    kept_.take(call, model_.hidden);
    plan_attention(kept_.call(), kept_attention_);
  }

  void plan_attention(const Call& call, AttentionWork& attention) {
    const HeadShape shape{model_.kv_heads, model_.query_heads / model_.kv_heads, model_.head_dim};
    attention.plan(shape, call.rows, team_->size(), [&](int m) {
      const int position = call.positions[m];
      return RowKeys{pages_of(call, m), first_key(position), position, call.row_loop ? call.row_loop[m] : 0};
    });
  }

  int widest() const {
    const Layer& l = layers_[0];
    int k = model_.hidden;
    for (const Linear* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) k = w->k > k ? w->k : k;
    return k;
  }

  int first_key(int position) const {
    return model_.window > 0 && position >= model_.window ? position - model_.window + 1 : 0;
  }

  static bool starts_at_token(const Call& call, int m) {
    return call.tokens && (!call.row_loop || call.row_loop[m] == 0);
  }

  // The KV plane of a row in one layer of a loop.
  int plane_of(const Call& call, int m, int loop, int layer) const {
    return (call.row_loop ? call.row_loop[m] : loop) * model_.layers + layer;
  }

  static const int32_t* pages_of(const Call& call, int m) {
    return call.page_table + static_cast<int64_t>(call.table[m]) * call.table_pages;
  }

  // ---- phases; each is run by every member

  float* hidden(const Call& call, int m) const { return call.hidden + static_cast<size_t>(m) * model_.hidden; }

  void embed(const Call& call, const Member& me) const {
    const Range mine = me.share(call.rows);
    for (int m = mine.begin; m < mine.end; ++m) {
      if (!starts_at_token(call, m)) continue;
      if (model_.tied_panels) {
        panels::unpack_row(model_.embedding, call.tokens[m], model_.hidden, hidden(call, m));
        continue;
      }
      const simd::bf16* from = model_.embedding + static_cast<size_t>(call.tokens[m]) * model_.hidden;
      for (int i = 0; i < model_.hidden; i += simd::kLanes)
        simd::store(hidden(call, m) + i, simd::load_bf16(from + i));
    }
    me.wait();
  }

  // Projects `heads`: all of them, or queries alone where keys and values are written already.
  void block(const Call& call, const Member& me, AttentionWork& attention, Range heads, int loop, int layer) {
    const Layer& w = layers_[layer];
    Prepared& own = prepared(me, call.rows);
    norm(call, me, w.input_norm, w.qkv, own);
    project_and_turn(call, me, w, own, heads, loop, layer);
    me.wait();
    lap(me, phases::kLinears);
    attend(call, me, attention, loop, layer);
    me.wait();
    lap(me, phases::kAttention);
    encode(me, attended_, call.rows, w.o, own, true);
    add_to_hidden(call, me, w.o, attended_, own, w.attention_out_norm);
    norm(call, me, w.post_norm, w.gate_up, own);
    gate(call, me, w.gate_up, own);
    me.wait();
    lap(me, phases::kLinears);
    encode(me, gated_, call.rows, w.down, own, true);
    add_to_hidden(call, me, w.down, gated_, own, w.mlp_out_norm);
    if (call.layer_taps) copy_tap(call, me, call.layer_taps[(loop - call.loop_begin) * model_.layers + layer]);
  }

  // The last loop and the head, where rows without a head end with their last keys and values.
  void end_early(const Call& call, const Member& me) {
    const int loop = call.loop_end - 1, layer = call.layer_end - 1;
    for (int before = call.layer_begin; before < layer; ++before) block(call, me, attention_, heads_, loop, before);
    const Layer& w = layers_[layer];
    Prepared& own = prepared(me, call.rows);
    norm(call, me, w.input_norm, w.qkv, own);
    project_and_turn(call, me, w, own, {queries_.end, heads_.end}, loop, layer);
    if (call.head_rows > 0) kept_.gather(call, me.share(call.head_rows));
    me.wait();
    lap(me, phases::kLinears);
    if (call.head_rows == 0) return;
    block(kept_.call(), me, kept_attention_, queries_, loop, layer);
    close_loop(kept_.call(), me, loop);
    finish(kept_.call(), me);
  }

  // Ends with the states of the loop ready for every member.
  void close_loop(const Call& call, const Member& me, int loop) {
    if (model_.recurrent_norm) {
      const Range mine = me.share(call.rows);
      for (int m = mine.begin; m < mine.end; ++m)
        rms_norm(hidden(call, m), model_.final_norm, model_.hidden, model_.eps, hidden(call, m));
      me.wait();
      lap(me, phases::kRest);
    }
    if (call.loop_taps) copy_tap(call, me, call.loop_taps[loop - call.loop_begin]);
  }

  static bool alone(int rows) { return rows <= kAloneRows; }
  Prepared& prepared(const Member& me, int rows) { return prepared_[alone(rows) ? me.index : 0]; }
  static Range rows_to_prepare(const Member& me, int rows) { return alone(rows) ? Range{0, rows} : me.share(rows); }

  // Ends with `own` ready for every member that shares it.
  void norm(const Call& call, const Member& me, const float* weight, const Linear& next, Prepared& own) {
    const Range mine = rows_to_prepare(me, call.rows);
    for (int m = mine.begin; m < mine.end; ++m)
      rms_norm(hidden(call, m), weight, model_.hidden, model_.eps, own.normed.row(m));
    lap(me, phases::kRest);
    encode(me, own.normed, call.rows, next, own, false);
    if (!alone(call.rows)) me.wait();
  }

  // Rounds rows to 8 bits if `next` wants that; with `ready`, for every member that shares `own`.
  void encode(const Member& me, const Rows& from, int rows, const Linear& next, Prepared& own, bool ready) {
    if (!next.quantized()) return;
    const Range mine = rows_to_prepare(me, rows);
    const size_t width = int4::padded(next.k), blocks = int4::blocks(next.k);
    const Codes& codes = own.codes;
    for (int m = mine.begin; m < mine.end; ++m)
      int4::quantize_row(from.row(m), next.k, codes.q.get() + m * width, codes.scale.get() + m * blocks,
                         codes.scaled_sum.get() + m * blocks);
    if (ready && !alone(rows)) me.wait();
  }

  static Input input(const Rows& rows, const Prepared& own, const Linear& w) {
    const Codes& codes = own.codes;
    return {{rows.row(0), rows.stride}, {codes.q.get(), codes.scale.get(), codes.scaled_sum.get(), w.k}};
  }

  // Counts what goes through a loop. Keys say it best: every row writes its own in the last layer of a loop, those
  // that end there as well, and nothing else of it is done by all of them. For one member to call.
  void count_loop(const Call& call, int loop) const {
    int64_t* rows = model_.work + kRowsByLoop;
    ++model_.work[kPasses];
    if (!call.row_loop) rows[loop] += call.rows;
    else
      for (int m = 0; m < call.rows; ++m) ++rows[call.row_loop[m]];
  }

  // Queries, keys and values, dealt by whole heads, so that who computed a head also turns it and writes it.
  void project_and_turn(const Call& call, const Member& me, const Layer& w, const Prepared& own, Range all, int loop,
                        int layer) {
    const int per_head = model_.head_dim / panels::kColumns;
    const bool writes_keys = all.end > queries_.end;
    if (me.index == 0 && writes_keys && layer == model_.layers - 1) count_loop(call, loop);
    me.deal(all.end - all.begin, 1, [&](Range dealt) {
      const Range heads{all.begin + dealt.begin, all.begin + dealt.end};
      apply(w.qkv, heads.begin * per_head, heads.end * per_head, input(own.normed, own, w.qkv), call.rows,
            [this](int panel, int row, F16 y) { simd::store(qkv_.row(row) + panel * panels::kColumns, y); });
      lap(me, phases::kLinears);
      turn_and_write(call, w, heads, loop, layer);
      lap(me, phases::kRest);
    });
  }

  void turn_and_write(const Call& call, const Layer& w, const Range& heads, int loop, int layer) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim));
    const int first_key_head = model_.query_heads, first_value_head = first_key_head + model_.kv_heads;
    const KvPages kv = pages(call);
    for (int m = 0; m < call.rows; ++m) {
      const int position = call.positions[m], plane = plane_of(call, m, loop, layer);
      const int page = pages_of(call, m)[position / kPageTokens], token = position % kPageTokens;
      for (int h = heads.begin; h < heads.end; ++h) {
        float* x = qkv_.row(m) + h * model_.head_dim;
        if (h < first_key_head) {
          turn(x, w.query_norm, position, scale);
        } else if (h < first_value_head) {
          turn(x, w.key_norm, position, 1.0f);
          kv.write_key(plane, page, h - first_key_head, token, x);
        } else {
          kv.write_value(plane, page, h - first_value_head, token, x);
        }
      }
    }
  }

  void turn(float* x, const float* norm_weight, int position, float scale) const {
    const int dim = model_.head_dim, half = dim / 2;
    if (norm_weight) rms_norm(x, norm_weight, dim, model_.eps, x);
    const size_t at = static_cast<size_t>(position) * half;
    rotate(x, model_.cosine + at, model_.sine + at, half, scale);
  }

  KvPages pages(const Call& call) const { return {call.kv, call.kv_pages, model_.kv_heads, model_.head_dim}; }

  void attend(const Call& call, const Member& me, AttentionWork& attention, int loop, int layer) {
    attention.run(
        me, pages(call), [&](int m) { return plane_of(call, m, loop, layer); },
        [this](int m) { return qkv_.row(m); }, [this](int m) { return attended_.row(m); });
  }

  // Adds the linear's output to the residual stream, by way of a norm where there is one. Ends with the stream
  // ready for every member.
  void add_to_hidden(const Call& call, const Member& me, const Linear& w, const Rows& from, const Prepared& own,
                     const float* norm_weight) {
    if (norm_weight) return add_normed(call, me, w, from, own, norm_weight);
    me.deal(w.panels(), kPanelsDealt, [&](Range mine) {
      apply(w, mine.begin, mine.end, input(from, own, w), call.rows, [this, &call](int panel, int row, F16 y) {
        float* x = hidden(call, row) + panel * panels::kColumns;
        simd::store(x, simd::add(simd::load(x), y));
      });
    });
    me.wait();
    lap(me, phases::kLinears);
  }

  void add_normed(const Call& call, const Member& me, const Linear& w, const Rows& from, const Prepared& own,
                  const float* norm_weight) {
    me.deal(w.panels(), kPanelsDealt, [&](Range mine) {
      apply(w, mine.begin, mine.end, input(from, own, w), call.rows,
            [this](int panel, int row, F16 y) { simd::store(branch_.row(row) + panel * panels::kColumns, y); });
    });
    me.wait();
    lap(me, phases::kLinears);
    const Range mine = me.share(call.rows);
    for (int m = mine.begin; m < mine.end; ++m) {
      rms_norm(branch_.row(m), norm_weight, model_.hidden, model_.eps, branch_.row(m));
      add_row(branch_.row(m), model_.hidden, hidden(call, m));
    }
    me.wait();
    lap(me, phases::kRest);
  }

  // Panels come in pairs, gate then up; the gate waits in the pair's output until its up arrives.
  void gate(const Call& call, const Member& me, const Linear& w, const Prepared& own) {
    me.deal(w.panels() / 2, kPanelsDealt / 2, [&](Range mine) {
      apply(w, 2 * mine.begin, 2 * mine.end, input(own.normed, own, w), call.rows, [this](int panel, int row, F16 y) {
        float* out = gated_.row(row) + panel / 2 * panels::kColumns;
        simd::store(out, panel % 2 == 0 ? y : gated(simd::load(out), y));
      });
    });
  }

  void copy_tap(const Call& call, const Member& me, float* tap) const {
    if (!tap) return;
    const Range mine = me.share(call.rows);
    const size_t width = model_.hidden;
    std::memcpy(tap + mine.begin * width, hidden(call, mine.begin), (mine.end - mine.begin) * width * sizeof(float));
  }

  // What the head reads of a row.
  void before_head(const Call& call, int m, float* out) const {
    if (model_.recurrent_norm) std::memcpy(out, hidden(call, m), model_.hidden * sizeof(float));
    else rms_norm(hidden(call, m), model_.final_norm, model_.hidden, model_.eps, out);
  }

  void finish(const Call& call, const Member& me) {
    const size_t width = model_.hidden;
    if (call.final_tap) {
      const Range mine = me.share(call.rows);
      for (int m = mine.begin; m < mine.end; ++m) before_head(call, m, call.final_tap + m * width);
    }
    if (call.head_rows == 0) return;
    if (me.index == 0) model_.work[kHeadRows] += call.head_rows;
    const Linear& w = call.screened ? model_.screen : model_.head;
    Prepared& own = prepared(me, call.head_rows);
    const Range mine = rows_to_prepare(me, call.head_rows);
    for (int r = mine.begin; r < mine.end; ++r) before_head(call, call.head_index[r], own.normed.row(r));
    lap(me, phases::kRest);
    encode(me, own.normed, call.head_rows, w, own, false);
    if (!alone(call.head_rows)) me.wait();
    const auto write = [&](int panel, int row, F16 y) {
      const int column = panel * panels::kColumns;
      float* out = call.logits + static_cast<size_t>(row) * w.n + column;
      if (column + panels::kColumns <= w.n) return simd::store(out, y);
      float lanes[simd::kLanes];
      simd::store(lanes, y);
      std::memcpy(out, lanes, (w.n - column) * sizeof(float));
    };
    me.deal(w.panels(), kHeadPanelsDealt, [&](Range columns) {
      apply(w, columns.begin, columns.end, input(own.normed, own, w), call.head_rows, write);
    });
  }

  Model model_;
  std::vector<Layer> layers_;
  team::Team* team_;
  const Range queries_, heads_;  // of the fused projection: queries, then keys, then values
  std::vector<Prepared> prepared_;
  Rows qkv_, attended_, gated_;
  Rows branch_;  // a linear's output on its way through the norm before the residual add
  KeptRows kept_;
  AttentionWork attention_, kept_attention_;
  phases::Stopwatch watch_;
};

}  // namespace forward
