// The head rows of a call as a call of their own: what goes on where the other rows have come to their end.
#pragma once
#include <cstring>
#include <vector>

#include "abi.h"
#include "buffer.h"
#include "team.h"

namespace forward {

class KeptRows {
 public:
  // Takes the head rows of `call`, in their order; their states come with `gather`. Raises std::bad_alloc.
  void take(const Call& call, int width) {
    const size_t rows = static_cast<size_t>(call.head_rows);
    width_ = static_cast<size_t>(width);
    positions_.resize(rows), table_.resize(rows), head_index_.resize(rows);
    hidden_.reserve(rows * width_);
    for (size_t r = 0; r < rows; ++r) {
      const int32_t m = call.head_index[r];
      positions_[r] = call.positions[m], table_[r] = call.table[m];
      head_index_[r] = static_cast<int32_t>(r);
    }
    call_ = call;
    call_.rows = call.head_rows;
    call_.tokens = nullptr;
    call_.positions = positions_.data(), call_.table = table_.data(), call_.head_index = head_index_.data();
    call_.hidden = hidden_.get();
  }

  // Copies the states of some of the head rows as they stand in `call`.
  void gather(const Call& call, team::Range rows) const {
    for (int r = rows.begin; r < rows.end; ++r)
      std::memcpy(hidden_.get() + r * width_, call.hidden + call.head_index[r] * width_, width_ * sizeof(float));
  }

  const Call& call() const { return call_; }

 private:
  Call call_ = {};
  size_t width_ = 0;
  std::vector<int32_t> positions_, table_, head_index_;
  Buffer<float> hidden_;
};

}  // namespace forward
