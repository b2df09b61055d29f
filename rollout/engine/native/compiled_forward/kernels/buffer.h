// Scratch that only grows, aligned to cache lines. Its content does not survive growing.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace forward {

template <class T>
class Buffer {
 public:
  // Raises std::bad_alloc. Zeroed, so that padding nobody writes is finite.
  void reserve(size_t count) {
    if (count <= count_) return;
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    count_ = data_ ? count : 0;
    if (!data_) throw std::bad_alloc();
    for (size_t i = 0; i < count; ++i) data_[i] = T();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t count_ = 0;
};

}  // namespace forward
