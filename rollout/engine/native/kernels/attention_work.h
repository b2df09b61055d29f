// The attention of a whole call, cut into pieces that members take as they come free.
//
// An item is one row and one KV head. Most are one piece. Where a call has few items, long ones are cut between
// chunks; what the chunks of a cut item make is then kept, and whoever ends its last piece folds them in order. So
// a cut changes who computes, and nothing that is computed.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace forward {

using team::Member;
using team::Range;

// Pieces each member should find at least, so that none waits long for the last one to end.
constexpr int kPiecesPerMember = 8;

// How often a member should come back for more: often enough to end together, seldom beside the pieces' own cost.
constexpr int kDealsPerMember = 16;

// How far ahead of its use a page is fetched: longer than memory takes to answer, less than a first-level cache.
constexpr int kPagesAhead = 2;

// Keys that a row reads: positions first to last of its own page table.
struct RowKeys {
  const int32_t* table;
  int first, last;

  int first_page() const { return first / kPageTokens; }
  int last_page() const { return last / kPageTokens; }
};

// Shape of a model's attention: `group` query heads share each KV head.
struct HeadShape {
  int kv_heads, group, head_dim;
};

class AttentionWork {
 public:
  // Takes the rows of a call, by `keys_of(row)`. Rows that follow one another on one page table are computed head
  // by head: they read the same keys. Raises std::bad_alloc.
  template <class KeysOf>
  void plan(const HeadShape& shape, int rows, int members, KeysOf keys_of) {
    shape_ = shape;
    own_.reserve(2 * floats() * members);
    rows_.clear();
    items_.clear();
    pieces_.clear();
    for (int m = 0; m < rows; ++m) rows_.push_back(keys_of(m));
    int64_t chunks = 0;
    for (int begin = 0, end = 0; begin < rows; begin = end) {
      while (end < rows && rows_[end].table == rows_[begin].table) ++end;
      for (int head = 0; head < shape.kv_heads; ++head)
        for (int m = begin; m < end; ++m) chunks += add_item(m, head);
    }
    cut(members == 1 ? chunks : std::max<int64_t>(1, chunks / (members * kPiecesPerMember)));
    dealt_ = std::max(1, static_cast<int>(pieces_.size()) / (members * kDealsPerMember));
  }

  // Run by every member. `plane_of(row)` is the row's KV plane; queries are scaled and stand, like the outputs,
  // (query heads, head_dim) at `query_of(row)` and `out_of(row)`. Outputs are ready after a barrier.
  template <class PlaneOf, class QueryOf, class OutOf>
  void run(const Member& me, const KvPages& kv, PlaneOf plane_of, QueryOf query_of, OutOf out_of) {
    me.deal(static_cast<int>(pieces_.size()), dealt_, [&](Range mine) {
      for (int p = mine.begin; p < mine.end; ++p) {
        const Piece& piece = pieces_[p];
        const Item& item = items_[piece.item];
        const size_t at = static_cast<size_t>(item.head) * shape_.group * shape_.head_dim;
        const float* query = query_of(item.row) + at;
        const Partial all = item.slot < 0 ? own(me, 0) : slot(item.slot);
        for (int chunk = piece.begin; chunk < piece.end; ++chunk) {
          const ChunkKeys keys = keys_of(piece.item, chunk, kv, plane_of);
          if (item.slot >= 0) {
            attend_chunk(query, shape_.group, keys, slot(item.slot + chunk - item.first_chunk));
          } else if (chunk == item.first_chunk) {
            attend_chunk(query, shape_.group, keys, all);
          } else {
            attend_chunk(query, shape_.group, keys, own(me, 1));
            fold(all, own(me, 1), shape_.group, shape_.head_dim);
          }
        }
        if (item.slot >= 0) {
          if (!ends(item)) continue;
          for (int i = 1; i < item.chunks(); ++i) fold(all, slot(item.slot + i), shape_.group, shape_.head_dim);
        }
        finish(all, shape_.group, shape_.head_dim, out_of(item.row) + at);
      }
    });
  }

 private:
  struct Item {
    int row, head;
    int first_chunk, last_chunk;
    int slot;            // of its first chunk; -1: one piece, which needs none
    int cut, cut_pieces;  // number among the cut items, and into how many pieces

    int chunks() const { return last_chunk - first_chunk + 1; }
  };

  struct Piece {
    int item, begin, end;  // chunks
  };

  int add_item(int row, int head) {
    const RowKeys& keys = rows_[row];
    items_.push_back({row, head, keys.first / kChunkKeys, keys.last / kChunkKeys, -1, 0, 1});
    return items_.back().chunks();
  }

  // Makes pieces of at most `most` chunks.
  void cut(int64_t most) {
    int slots = 0, cuts = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      const int chunks = item.chunks(), pieces = static_cast<int>((chunks + most - 1) / most);
      if (pieces > 1) {
        item.slot = slots;
        item.cut = cuts++;
        item.cut_pieces = pieces;
        slots += chunks;
      }
      for (int p = 0; p < pieces; ++p)
        pieces_.push_back({static_cast<int>(i), item.first_chunk + chunks * p / pieces,
                           item.first_chunk + chunks * (p + 1) / pieces});
    }
    slots_.reserve(floats() * slots);
    if (cuts > cuts_) {
      ended_.reset(new std::atomic<int>[cuts]);
      cuts_ = cuts;
    }
    for (int i = 0; i < cuts; ++i) ended_[i].store(0, std::memory_order_relaxed);
  }

  size_t floats() const { return Partial::floats(shape_.group, shape_.head_dim); }
  Partial slot(int i) const { return Partial::at(slots_.get() + i * floats(), shape_.group, shape_.head_dim); }
  Partial own(const Member& me, int i) const {
    return Partial::at(own_.get() + (2 * me.index + i) * floats(), shape_.group, shape_.head_dim);
  }

  // Whether all other pieces of a cut item have ended; what they made is visible then. Ready for the next layer.
  bool ends(const Item& item) {
    std::atomic<int>& ended = ended_[item.cut];
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < item.cut_pieces) return false;
    ended.store(0, std::memory_order_relaxed);
    return true;
  }

  template <class PlaneOf>
  ChunkKeys keys_of(int number, int chunk, const KvPages& kv, PlaneOf plane_of) const {
    const Item& item = items_[number];
    const Item& next = items_[std::min<size_t>(number + 1, items_.size() - 1)];
    const RowKeys &keys = rows_[item.row], &after = rows_[next.row];
    const int plane = plane_of(item.row), plane_after = plane_of(next.row);
    const int page = std::max(keys.first_page(), chunk * kChunkPages);
    const int start = page * kPageTokens;
    ChunkKeys found;
    found.head_dim = shape_.head_dim;
    found.pages = std::min(keys.last_page(), (chunk + 1) * kChunkPages - 1) - page + 1;
    found.first = std::max(keys.first - start, 0);
    found.last = std::min(keys.last - start, found.pages * kPageTokens - 1);
    for (int i = 0; i < found.pages; ++i) {
      found.page[i] = kv.keys(plane, keys.table[page + i], item.head);
      const int ahead = page + i + kPagesAhead, past = ahead - keys.last_page() - 1;
      found.ahead[i] = past < 0 ? kv.keys(plane, keys.table[ahead], item.head)
                                : kv.keys(plane_after, after.table[std::min(after.first_page() + past, after.last_page())],
                                          next.head);
    }
    return found;
  }

  HeadShape shape_ = {};
  std::vector<RowKeys> rows_;
  std::vector<Item> items_;
  std::vector<Piece> pieces_;
  int dealt_ = 1;
  Buffer<float> slots_, own_;
  std::unique_ptr<std::atomic<int>[]> ended_;
  int cuts_ = 0;
};

}  // namespace forward
