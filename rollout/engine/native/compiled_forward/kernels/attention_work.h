// The attention of a whole call, cut into pieces that members take as they come free.
//
// An item is a row. Its units are (chunk, KV head), heads of one chunk together: so a row's keys and values are
// walked in the order they stand in memory. Most items are one piece. Where a call has few rows, long ones are cut
// between units; what the units of a cut item make is then kept, and whoever ends its last piece folds them, each
// head's in order of chunks. So a cut changes who computes, and nothing that is computed.
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
  // Takes the rows of a call, by `keys_of(row)`. Raises std::bad_alloc.
  template <class KeysOf>
  void plan(const HeadShape& shape, int rows, int members, KeysOf keys_of) {
    shape_ = shape;
    own_.reserve(floats() * (shape.kv_heads + 1) * members);
    items_.clear();
    pieces_.clear();
    int64_t units = 0;
    for (int m = 0; m < rows; ++m) {
      const RowKeys keys = keys_of(m);
      items_.push_back({keys, keys.first / kChunkKeys, keys.last / kChunkKeys, -1, 0, 1});
      units += items_.back().chunks() * shape.kv_heads;
    }
    cut(members == 1 ? units : std::max<int64_t>(1, units / (members * kPiecesPerMember)));
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
        for (int unit = piece.begin; unit < piece.end; ++unit) {
          const int head = unit % shape_.kv_heads;
          const ChunkKeys keys = keys_of(piece.item, unit, kv, plane_of);
          const float* query = query_of(piece.item) + static_cast<size_t>(head) * width();
          if (item.slot >= 0) {
            attend_chunk(query, shape_.group, keys, slot(item.slot + unit));
          } else if (unit < shape_.kv_heads) {
            attend_chunk(query, shape_.group, keys, own(me, head));
          } else {
            attend_chunk(query, shape_.group, keys, own(me, shape_.kv_heads));
            fold(own(me, head), own(me, shape_.kv_heads), shape_.group, shape_.head_dim);
          }
        }
        if (item.slot < 0) {
          finish_heads(out_of(piece.item), [&](int head) { return own(me, head); });
        } else if (ends(item)) {
          for (int unit = shape_.kv_heads; unit < item.chunks() * shape_.kv_heads; ++unit)
            fold(slot(item.slot + unit % shape_.kv_heads), slot(item.slot + unit), shape_.group, shape_.head_dim);
          finish_heads(out_of(piece.item), [&](int head) { return slot(item.slot + head); });
        }
      }
    });
  }

 private:
  struct Item {
    RowKeys keys;
    int first_chunk, last_chunk;
    int slot;             // of its first unit; -1: one piece, which needs none
    int cut, cut_pieces;  // number among the cut items, and into how many pieces

    int chunks() const { return last_chunk - first_chunk + 1; }
  };

  struct Piece {
    int item, begin, end;  // units
  };

  // Makes pieces of at most `most` units; what is cut at all is cut evenly.
  void cut(int64_t most) {
    int slots = 0, cuts = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      const int units = item.chunks() * shape_.kv_heads;
      // Few rows are worth cutting up to single units; a row that is a piece or a half stays whole.
      const int pieces = units < 2 * most ? 1 : static_cast<int>((units + most - 1) / most);
      if (pieces > 1) {
        item.slot = slots;
        item.cut = cuts++;
        item.cut_pieces = pieces;
        slots += units;
      }
      for (int p = 0; p < pieces; ++p)
        pieces_.push_back({static_cast<int>(i), static_cast<int>(static_cast<int64_t>(units) * p / pieces),
                           static_cast<int>(static_cast<int64_t>(units) * (p + 1) / pieces)});
    }
    slots_.reserve(floats() * slots);
    if (cuts > cuts_) {
      ended_.reset(new std::atomic<int>[cuts]);
      cuts_ = cuts;
    }
    for (int i = 0; i < cuts; ++i) ended_[i].store(0, std::memory_order_relaxed);
  }

  int width() const { return shape_.group * shape_.head_dim; }
  size_t floats() const { return Partial::floats(shape_.group, shape_.head_dim); }
  Partial slot(int i) const { return Partial::at(slots_.get() + i * floats(), shape_.group, shape_.head_dim); }
  // A member's own: one for each KV head, and one more.
  Partial own(const Member& me, int i) const {
    const size_t at = static_cast<size_t>(me.index) * (shape_.kv_heads + 1) + i;
    return Partial::at(own_.get() + at * floats(), shape_.group, shape_.head_dim);
  }

  template <class PartialOf>
  void finish_heads(float* out, PartialOf partial_of) const {
    for (int head = 0; head < shape_.kv_heads; ++head)
      finish(partial_of(head), shape_.group, shape_.head_dim, out + static_cast<size_t>(head) * width());
  }

  // Whether all other pieces of a cut item have ended; what they made is visible then. Ready for the next layer.
  bool ends(const Item& item) {
    std::atomic<int>& ended = ended_[item.cut];
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < item.cut_pieces) return false;
    ended.store(0, std::memory_order_relaxed);
    return true;
  }

  struct PageRange {
    int begin, end;
  };
  static PageRange pages_of(const Item& item, int chunk) {
    return {std::max(item.keys.first_page(), chunk * kChunkPages),
            std::min(item.keys.last_page() + 1, (chunk + 1) * kChunkPages)};
  }

  template <class PlaneOf>
  ChunkKeys keys_of(int number, int unit, const KvPages& kv, PlaneOf plane_of) const {
    const Item& item = items_[number];
    const int heads = shape_.kv_heads, head = unit % heads, chunk = item.first_chunk + unit / heads;
    const PageRange range = pages_of(item, chunk);
    const int plane = plane_of(number), start = range.begin * kPageTokens;
    ChunkKeys found;
    found.head_dim = shape_.head_dim;
    found.pages = range.end - range.begin;
    found.first = std::max(item.keys.first - start, 0);
    found.last = std::min(item.keys.last - start, found.pages * kPageTokens - 1);
    for (int i = 0; i < found.pages; ++i) found.page[i] = kv.keys(plane, item.keys.table[range.begin + i], head);
    for (int i = 0; i + kPagesAhead < found.pages; ++i) found.ahead[i] = found.page[i + kPagesAhead];

    // The last pages fetch for the unit that comes next.
    const bool more = unit + 1 < item.chunks() * heads;
    const int next_number = more || number + 1 == static_cast<int>(items_.size()) ? number : number + 1;
    const Item& next = items_[next_number];
    const int next_unit = more ? unit + 1 : 0, next_head = next_unit % heads;
    const PageRange after = pages_of(next, next.first_chunk + next_unit / heads);
    const int next_plane = plane_of(next_number), from = std::max(0, found.pages - kPagesAhead);
    for (int i = from; i < found.pages; ++i)
      found.ahead[i] = kv.keys(next_plane, next.keys.table[std::min(after.begin + i - from, after.end - 1)], next_head);
    return found;
  }

  HeadShape shape_ = {};
  std::vector<Item> items_;
  std::vector<Piece> pieces_;
  int dealt_ = 1;
  Buffer<float> slots_, own_;
  std::unique_ptr<std::atomic<int>[]> ended_;
  int cuts_ = 0;
};

}  // namespace forward
