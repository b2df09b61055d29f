// The attention of a whole call, cut into pieces that members take as they come free.
//
// A unit is a chunk and a KV head, for all rows that read these keys (attention_plan.h): memory is walked in the order
// it stands, once for all of them. Most bands of rows are one piece. Where a call has few, long ones are cut between
// units; what the units of a cut band make is then kept, and whoever ends its last piece folds them, each row's in
// order of chunks. So sharing and cutting change who computes and when, and nothing that is computed.
#pragma once
#include <atomic>
#include <memory>

#include "attention.h"
#include "attention_plan.h"
#include "buffer.h"
#include "team.h"

namespace forward {

using team::Member;
using team::Range;

// How far ahead of its use a page is fetched: longer than memory takes to answer, less than a first-level cache.
constexpr int kPagesAhead = 2;

// How often a member should come back for more: often enough to end together, seldom beside the pieces' own cost.
constexpr int kDealsPerMember = 16;

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
    own_.reserve(floats() * owned() * members);
    plan_.make(rows, shape.kv_heads, members, keys_of);
    slots_.reserve(floats() * plan_.slots());
    if (plan_.cuts() > cuts_) {
      ended_.reset(new std::atomic<int>[plan_.cuts()]);
      cuts_ = plan_.cuts();
    }
    for (int i = 0; i < plan_.cuts(); ++i) ended_[i].store(0, std::memory_order_relaxed);
    dealt_ = std::max(1, static_cast<int>(plan_.pieces().size()) / (members * kDealsPerMember));
  }

  // Run by every member. `plane_of(row)` is the row's KV plane; queries are scaled and stand, like the outputs,
  // (query heads, head_dim) at `query_of(row)` and `out_of(row)`. Outputs are ready after a barrier.
  template <class PlaneOf, class QueryOf, class OutOf>
  void run(const Member& me, const KvPages& kv, PlaneOf plane_of, QueryOf query_of, OutOf out_of) {
    me.deal(static_cast<int>(plan_.pieces().size()), dealt_, [&](Range mine) {
      for (int p = mine.begin; p < mine.end; ++p) {
        const Piece& piece = plan_.pieces()[p];
        const Band& band = plan_.bands()[piece.band];
        for (int u = piece.begin; u < piece.end; ++u) {
          const Unit unit = plan_.unit(piece.band, u);
          for (int r = unit.stretch->begin; r < unit.stretch->end; ++r) {
            const ChunkKeys keys = keys_of(piece.band, u, r, kv, plane_of);
            const Reader& reader = plan_.readers()[r];
            const float* query = query_of(reader.row) + static_cast<size_t>(unit.head) * width();
            if (band.cut >= 0) {
              attend_chunk(query, shape_.group, keys, slot(unit, r));
            } else if (unit.stretch->chunk == reader.first_chunk()) {
              attend_chunk(query, shape_.group, keys, own(me, band, r, unit.head));
            } else {
              attend_chunk(query, shape_.group, keys, spare(me));
              fold(own(me, band, r, unit.head), spare(me), shape_.group, shape_.head_dim);
            }
          }
        }
        if (band.cut < 0) {
          finish_band(band, out_of, [&](int r, int head) { return own(me, band, r, head); });
        } else if (ends(band)) {
          fold_slots(piece.band);
          finish_band(band, out_of, [&](int r, int head) { return slot(plan_.first_unit(r, head), r); });
        }
      }
    });
  }

 private:
  int width() const { return shape_.group * shape_.head_dim; }
  size_t floats() const { return Partial::floats(shape_.group, shape_.head_dim); }

  // What a cut band's unit makes of a reader.
  Partial slot(const Unit& unit, int reader) const {
    return Partial::at(slots_.get() + unit.slot(reader) * floats(), shape_.group, shape_.head_dim);
  }

  // A member's own: one for each KV head of each row of a band, and a spare.
  int owned() const { return kBandRows * shape_.kv_heads + 1; }
  Partial own_at(const Member& me, int i) const {
    const size_t at = static_cast<size_t>(me.index) * owned() + i;
    return Partial::at(own_.get() + at * floats(), shape_.group, shape_.head_dim);
  }
  Partial own(const Member& me, const Band& band, int reader, int head) const {
    return own_at(me, (reader - band.begin) * shape_.kv_heads + head);
  }
  Partial spare(const Member& me) const { return own_at(me, owned() - 1); }

  // Into the slots of each reader's first chunk, which come first.
  void fold_slots(int band) const {
    for (int u = 0; u < plan_.bands()[band].units; ++u) {
      const Unit unit = plan_.unit(band, u);
      for (int r = unit.stretch->begin; r < unit.stretch->end; ++r)
        if (unit.stretch->chunk != plan_.readers()[r].first_chunk())
          fold(slot(plan_.first_unit(r, unit.head), r), slot(unit, r), shape_.group, shape_.head_dim);
    }
  }

  template <class OutOf, class PartialOf>
  void finish_band(const Band& band, OutOf out_of, PartialOf partial_of) const {
    for (int r = band.begin; r < band.end; ++r)
      for (int head = 0; head < shape_.kv_heads; ++head)
        finish(partial_of(r, head), shape_.group, shape_.head_dim,
               out_of(plan_.readers()[r].row) + static_cast<size_t>(head) * width());
  }

  // Whether all other pieces of a cut band have ended; what they made is visible then. Ready for the next layer.
  bool ends(const Band& band) {
    std::atomic<int>& ended = ended_[band.cut];
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < band.cut_pieces) return false;
    ended.store(0, std::memory_order_relaxed);
    return true;
  }

  template <class PlaneOf>
  ChunkKeys keys_of(int band, int number, int r, const KvPages& kv, PlaneOf plane_of) const {
    const Unit unit = plan_.unit(band, number);
    const Reader& reader = plan_.readers()[r];
    const Span span = reader.pages_of(unit.stretch->chunk);
    const int plane = plane_of(reader.row), start = span.begin * kPageTokens;
    ChunkKeys found;
    found.head_dim = shape_.head_dim;
    found.pages = span.end - span.begin;
    found.first = std::max(reader.keys.first - start, 0);
    found.last = std::min(reader.keys.last - start, found.pages * kPageTokens - 1);
    for (int i = 0; i < found.pages; ++i) found.page[i] = kv.keys(plane, reader.keys.table[span.begin + i], unit.head);
    // A reader alone fetches a little ahead of itself, its last pages for the unit that comes next. Of several the
    // last one does, for it has all it needs at hand, and fetches the next unit whole.
    const bool last = r + 1 == unit.stretch->end, alone = unit.stretch->end - unit.stretch->begin == 1;
    const int of_its_own = !last ? found.pages : alone ? std::max(0, found.pages - kPagesAhead) : 0;
    for (int i = 0; i < of_its_own; ++i) found.ahead[i] = found.page[std::min(i + kPagesAhead, found.pages - 1)];
    if (!last) return found;
    const Unit next = plan_.unit_after(band, number);
    const Reader& other = plan_.readers()[next.stretch->begin];
    const Span after = other.pages_of(next.stretch->chunk);
    const int next_plane = plane_of(other.row);
    for (int i = of_its_own; i < found.pages; ++i) {
      const int page = std::min(after.begin + i - of_its_own, after.end - 1);
      found.ahead[i] = kv.keys(next_plane, other.keys.table[page], next.head);
    }
    return found;
  }

  HeadShape shape_ = {};
  AttentionPlan plan_;
  int dealt_ = 1;
  Buffer<float> slots_, own_;
  std::unique_ptr<std::atomic<int>[]> ended_;
  int cuts_ = 0;
};

}  // namespace forward
