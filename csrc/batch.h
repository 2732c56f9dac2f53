// The rows of a pass with what they own, as the bindings make them.
#pragma once
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "blocks.h"

namespace ridgeline {

struct Batch {
  std::vector<int64_t> offsets, starts;
  std::vector<int64_t> tokens, positions, lo, hi, slots, table;   // empty where the caller keeps them
  std::vector<std::vector<uint64_t>> masks;
  std::vector<const uint64_t*> ancestors;
  BatchView view{};
};

using Integers = std::vector<int64_t>;

// One sequence's rows: cache position of the first, their tokens, the sequence's pages; where they are no chain their RoPE
// positions; where they are not causal the ends of what they see; where they are a tree their parents.
using Row = std::tuple<int64_t, Integers, Integers, std::optional<Integers>, std::optional<Integers>, std::optional<Integers>>;

// Both throw std::invalid_argument for rows that do not fit each other.
std::unique_ptr<Batch> batch_of(std::vector<Row> rows, int64_t page_size);
// Of arrays that stay the caller's: see BatchView. parents: for each row, or none for a chain.
std::unique_ptr<Batch> batch_over(Integers offsets, Integers starts, const int64_t* positions, const int64_t* lo,
                                  const int64_t* hi, const int64_t* slots, const int64_t* page_table, int64_t pages,
                                  int64_t page_size, const std::vector<std::optional<Integers>>& parents);

}  // namespace ridgeline
