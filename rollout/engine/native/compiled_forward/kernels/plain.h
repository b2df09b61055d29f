// Sequences that decode plainly, by column (plain_batch.py): what a choice for each of them changes.
#pragma once
#include <cstdint>

#include "choose.h"

namespace plain {

// Pointers are to arrays over rows unless said otherwise.
struct Columns {
  int32_t* tokens;        // each sequence's last one, the next forward's input
  int32_t* positions;     // of those
  int64_t* contexts;      // tokens of each sequence: the position of its next one
  const int64_t* ends;    // most tokens it may have
  const int64_t* held;    // tokens that its pages hold
  const int32_t* stops;   // (rows, stops_each): ids that end it
  const uint8_t* watched; // whether each of its tokens is looked at
  int32_t* over;          // out, `overs` of them: rows that may have ended, and the watched, ascending
  int32_t stops_each;
  int32_t overs;          // out
  int32_t full;           // out: rows whose pages do not hold the last token
};

inline bool stops(const Columns& columns, int row, int32_t token) {
  const int32_t* ids = columns.stops + static_cast<int64_t>(row) * columns.stops_each;
  for (int i = 0; i < columns.stops_each; ++i)
    if (ids[i] == token) return true;
  return false;
}

// Every row gets the token that was chosen for it. That of a row which could not be chosen from is none, and its
// sequence ends.
inline void advance(Columns& columns, const choose::Call& chosen) {
  columns.overs = columns.full = 0;
  for (int row = 0; row < chosen.rows; ++row) {
    const int32_t token = chosen.tokens[row];
    const int64_t context = ++columns.contexts[row];
    columns.tokens[row] = token;
    columns.positions[row] = static_cast<int32_t>(context - 1);
    columns.full += context > columns.held[row];
    if (columns.watched[row] || !chosen.finite[row] || context >= columns.ends[row] || stops(columns, row, token))
      columns.over[columns.overs++] = row;
  }
}

}  // namespace plain
