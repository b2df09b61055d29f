// Which rows of a call read the same keys, and into which pieces the attention over them is cut.
//
// Rows of one sequence (a verification, a part of a prompt) read the same pages as far as the shorter one reads, and
// samples of one prompt share the prompt's. Such rows stand beside each other in a band. A band is walked depth
// first, chunk by chunk: all rows that read the chunk's pages, then what each part of them reads after it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace forward {

// Pieces each member should find at least, so that none waits long for the last one to end.
constexpr int kPiecesPerMember = 8;

// Rows of a band at most. With more, keys and values would be read a little less often, but what is known of the rows
// between two chunks would no longer stay in a second-level cache. Where there are rows for all members without it,
// bands are smaller: a cut band has to keep what every unit makes of every row.
constexpr int kBandRows = 16;
constexpr int kLeastBandRows = 8;

// Keys that a row reads: positions first to last of its own page table. Rows of different `planes` have nothing in
// common, whatever their pages.
struct RowKeys {
  const int32_t* table;
  int first, last;
  int planes;
};

// Pages of a table.
struct Span {
  int begin, end;
};

struct Reader {
  RowKeys keys;
  int row;
  int first_stretch;  // where its first chunk is

  int first_chunk() const { return keys.first / kChunkKeys; }
  int last_chunk() const { return keys.last / kChunkKeys; }
  Span pages_of(int chunk) const {
    return {std::max(keys.first / kPageTokens, chunk * kChunkPages),
            std::min(keys.last / kPageTokens + 1, (chunk + 1) * kChunkPages)};
  }
};

// Readers [begin, end) of one chunk.
struct Stretch {
  int chunk, begin, end;
  int slot;  // of its first reader and head, where the band is cut
};

// Neighbouring readers and their stretches; a unit is one head of a stretch.
struct Band {
  int begin, end;
  int first_stretch, units;
  int cut, cut_pieces;  // number among the cut bands or -1, and into how many pieces
};

struct Unit {
  const Stretch* stretch;
  int head;

  int slot(int reader) const {
    return stretch->slot + head * (stretch->end - stretch->begin) + reader - stretch->begin;
  }
};

struct Piece {
  int band, begin, end;  // units
};

class AttentionPlan {
 public:
  // Raises std::bad_alloc.
  template <class KeysOf>
  void make(int rows, int heads, int members, KeysOf keys_of) {
    heads_ = heads;
    readers_.clear(), stretches_.clear(), bands_.clear(), pieces_.clear();
    for (int m = 0; m < rows; ++m) readers_.push_back({keys_of(m), m, 0});
    std::sort(readers_.begin(), readers_.end(), before);
    const int most = std::clamp(rows / (members * kPiecesPerMember), kLeastBandRows, kBandRows);
    for (int begin = 0, end; begin < rows; begin = end) {
      const int last = std::min(rows, begin + most);
      for (end = begin + 1; end < last && share(readers_[begin], readers_[end], readers_[begin].first_chunk());) ++end;
      Band band{begin, end, static_cast<int>(stretches_.size()), 0, -1, 1};
      walk(begin, end, readers_[begin].first_chunk());
      band.units = (static_cast<int>(stretches_.size()) - band.first_stretch) * heads;
      bands_.push_back(band);
    }
    cut(members);
  }

  const std::vector<Reader>& readers() const { return readers_; }
  const std::vector<Band>& bands() const { return bands_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  int slots() const { return slots_; }
  int cuts() const { return cuts_; }

  // Heads of one chunk together: so keys and values are walked in the order they stand in memory.
  Unit unit(int band, int number) const {
    return {&stretches_[bands_[band].first_stretch + number / heads_], number % heads_};
  }

  // The unit of a reader's first chunk.
  Unit first_unit(int reader, int head) const { return {&stretches_[readers_[reader].first_stretch], head}; }

  // The one that is walked after it, or itself where nothing is.
  Unit unit_after(int band, int number) const {
    if (number + 1 < bands_[band].units) return unit(band, number + 1);
    return band + 1 < static_cast<int>(bands_.size()) ? unit(band + 1, 0) : unit(band, number);
  }

 private:
  // An order in which rows that read the same pages stand together, those that end first first.
  static bool before(const Reader& a, const Reader& b) {
    if (a.keys.planes != b.keys.planes) return a.keys.planes < b.keys.planes;
    if (a.first_chunk() != b.first_chunk()) return a.first_chunk() < b.first_chunk();
    if (a.keys.table != b.keys.table) {
      const int end = std::min(a.keys.last, b.keys.last) / kPageTokens + 1;
      for (int p = a.first_chunk() * kChunkPages; p < end; ++p)
        if (a.keys.table[p] != b.keys.table[p]) return a.keys.table[p] < b.keys.table[p];
    }
    return a.keys.last != b.keys.last ? a.keys.last < b.keys.last : a.row < b.row;
  }

  // Whether two rows begin a chunk with the same page. A wrong answer would cost time alone: each reads its own pages.
  static bool share(const Reader& a, const Reader& b, int chunk) {
    if (a.keys.planes != b.keys.planes || a.first_chunk() != b.first_chunk()) return false;
    const int page = std::max(a.pages_of(chunk).begin, b.pages_of(chunk).begin);
    return a.keys.table == b.keys.table || a.keys.table[page] == b.keys.table[page];
  }

  // Makes the stretches of readers that all read `chunk`, and of what they read after it.
  void walk(int begin, int end, int chunk) {
    for (int first = begin, last; first < end; first = last) {
      for (last = first + 1; last < end && share(readers_[first], readers_[last], chunk);) ++last;
      const int number = static_cast<int>(stretches_.size());
      stretches_.push_back({chunk, first, last, 0});
      for (int r = first; r < last; ++r)
        if (readers_[r].first_chunk() == chunk) readers_[r].first_stretch = number;
      for (int r = first; r < last;) {
        const int from = r;
        while (r < last && readers_[r].last_chunk() > chunk) ++r;
        if (r > from) walk(from, r, chunk + 1);
        else ++r;
      }
    }
  }

  // A unit's cost, about: what each of its readers computes, and the reading.
  int cost(const Stretch& stretch) const { return stretch.end - stretch.begin + 1; }

  void cut(int members) {
    int64_t all = 0;
    for (const Stretch& stretch : stretches_) all += static_cast<int64_t>(heads_) * cost(stretch);
    const int64_t most = members == 1 ? all : std::max<int64_t>(2, all / (members * kPiecesPerMember));
    slots_ = cuts_ = 0;
    for (size_t b = 0; b < bands_.size(); ++b) cut(static_cast<int>(b), most);
  }

  // Makes pieces of about `most`; what is cut at all is cut evenly. Few rows are worth cutting up to single units; a
  // band that is a piece or a half stays whole.
  void cut(int number, int64_t most) {
    Band& band = bands_[number];
    int64_t all = 0;
    for (int u = 0; u < band.units; ++u) all += cost(*unit(number, u).stretch);
    const int64_t wanted = all < 2 * most ? 1 : (all + most - 1) / most;
    const size_t before = pieces_.size();
    int64_t done = 0;
    for (int u = 0, begin = 0; u < band.units; ++u) {
      const int64_t part = done * wanted / all;
      done += cost(*unit(number, u).stretch);
      if (u + 1 < band.units && done * wanted / all == part) continue;
      pieces_.push_back({number, begin, u + 1});
      begin = u + 1;
    }
    band.cut_pieces = static_cast<int>(pieces_.size() - before);
    if (band.cut_pieces == 1) return;
    band.cut = cuts_++;
    for (int s = 0; s < band.units / heads_; ++s) {
      Stretch& stretch = stretches_[band.first_stretch + s];
      stretch.slot = slots_;
      slots_ += heads_ * (stretch.end - stretch.begin);
    }
  }

  int heads_ = 1, slots_ = 0, cuts_ = 0;
  std::vector<Reader> readers_;
  std::vector<Stretch> stretches_;
  std::vector<Band> bands_;
  std::vector<Piece> pieces_;
};

}  // namespace forward
