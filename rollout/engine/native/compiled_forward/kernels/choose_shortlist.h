// Who leads a race: the one best token, or the few best.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "choose.h"

namespace choose {

constexpr double kNever = -std::numeric_limits<double>::infinity();

struct Best {
  double score;
  int32_t token;

  double bar() const { return score; }

  void enter(int32_t other, double its_score) {
    if (its_score > score || (its_score == score && other < token)) *this = {its_score, other};
  }
};

// The first tokens in the order (score descending, id ascending), whatever order they come in.
class Shortlist {
 public:
  void clear(int size) {
    size_ = std::min(size, kMostListed);
    count_ = 0;
  }

  // What a score must reach.
  double bar() const { return count_ < size_ ? kNever : scores_[count_ - 1]; }

  void enter(int32_t token, double score) {
    if (count_ == size_ && !ahead(token, score, count_ - 1)) return;
    int place = count_ < size_ ? count_++ : count_ - 1;
    for (; place > 0 && ahead(token, score, place - 1); --place) {
      scores_[place] = scores_[place - 1];
      tokens_[place] = tokens_[place - 1];
    }
    scores_[place] = score;
    tokens_[place] = token;
  }

  int count() const { return count_; }
  const int32_t* tokens() const { return tokens_; }

 private:
  bool ahead(int32_t token, double score, int place) const {
    return score > scores_[place] || (score == scores_[place] && token < tokens_[place]);
  }

  double scores_[kMostListed];
  int32_t tokens_[kMostListed];
  int size_ = 0, count_ = 0;
};

}  // namespace choose
