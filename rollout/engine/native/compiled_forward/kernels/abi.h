// What crosses the C interface. Every struct is mirrored, field by field, in kernels/abi.py.
#pragma once
#include <cstdint>

#include "linear.h"

namespace forward {

struct Layer {
  Linear qkv, o, gate_up, down;
  const float *input_norm, *post_norm;
  const float *query_norm, *key_norm;         // per head, or null
  const float *attention_out_norm, *mlp_out_norm;  // before the residual add, or null
};

// Where a decoder counts what it computes: after these come the rows that went through each loop.
enum Work : int32_t { kPasses = 0, kHeadRows, kRowsByLoop };

struct Model {
  int32_t vocab, hidden, layers, query_heads, kv_heads, head_dim, max_positions;
  int32_t window;  // keys a row reads at most; 0: all
  int32_t loops;
  int32_t recurrent_norm;  // 1: the final norm closes every loop, and the head reads its output
  int32_t tied_panels;     // whether `embedding` is in panels
  float eps;
  const simd::bf16* embedding;  // (vocab, hidden), or where it is the head as well: its panels
  const float *cosine, *sine;   // (max_positions, head_dim / 2)
  const float* final_norm;
  const Layer* layer;
  Linear head;
  Linear screen;  // the head once more in fewer bits, or none (data is null)
  int64_t* work;  // (kRowsByLoop + loops), counted up; the caller's
};

// One forward, or a part of one. Shapes as in rows.py: M rows, S tables of P pages, R head rows.
struct Call {
  int32_t rows, head_rows, tables, table_pages;
  int32_t loop_begin, loop_end;  // empty: no block
  int32_t layer_begin, layer_end;  // some of them only in a call of one loop; the loop's norm and head rows need the last
  int32_t screened;              // 1: the logits are the screen's
  int32_t heads_only;            // 1: of rows without a head only keys and values are wanted, no states
  const int32_t* row_loop;       // null, or each row's own loop, in a call of one
  const int32_t* tokens;         // null: `hidden` is the input; with row_loop it is, but for rows of loop 0
  const int32_t *positions, *table, *page_table, *head_index;
  simd::bf16* kv;      // the plane of loop 0, layer 0; what stands before it and behind the last one is not touched
  int64_t kv_pages;
  float* hidden;       // (M, hidden), in and out
  float* logits;       // (R, head.n)
  float** layer_taps;  // per (loop - loop_begin) * layers + layer a buffer or null; or null
  float** loop_taps;   // per loop - loop_begin a buffer or null; or null
  float *embed_tap, *final_tap;
  double* phase_s;  // out: seconds by phases::Phase, or null
};

enum Status : int32_t {
  kOk = 0, kBadToken, kBadPosition, kBadPage, kBadHeadRow, kNoMemory, kForked, kBadLoop, kBadLayers
};

}  // namespace forward
