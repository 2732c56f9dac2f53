#include "batch.h"

#include <algorithm>
#include <stdexcept>

namespace ridgeline {
namespace {

void ancestors_of(Batch& b, const std::vector<std::optional<Integers>>& parents) {
  const size_t rows = b.starts.size();
  b.masks.resize(rows);
  b.ancestors.assign(rows, nullptr);
  for (size_t r = 0; r < rows && r < parents.size(); ++r) {
    if (!parents[r]) continue;
    const Integers& p = *parents[r];
    const size_t n = p.size(), words = (n + 63) / 64;
    auto& mask = b.masks[r];
    mask.assign(n * words, 0);
    for (size_t i = 0; i < n; ++i) {
      if (p[i] >= static_cast<int64_t>(i)) throw std::invalid_argument("batch: a parent comes before its children");
      for (size_t w = 0; p[i] >= 0 && w < words; ++w) mask[i * words + w] = mask[static_cast<size_t>(p[i]) * words + w];
      mask[i * words + i / 64] |= uint64_t{1} << (i % 64);
    }
    b.ancestors[r] = mask.data();
  }
}

std::unique_ptr<Batch> finished(std::unique_ptr<Batch> b, BatchView view, const std::vector<std::optional<Integers>>& parents) {
  const bool trees = std::any_of(parents.begin(), parents.end(), [](const auto& p) { return p.has_value(); });
  if (trees) ancestors_of(*b, parents);
  view.tokens = b->offsets.back(), view.rows = static_cast<int64_t>(b->starts.size());
  view.offsets = b->offsets.data(), view.starts = b->starts.data();
  view.ancestors = trees ? b->ancestors.data() : nullptr;
  b->view = view;
  return b;
}

void check_page(int64_t page_size) {
  if (page_size < 8 || page_size % 8) throw std::invalid_argument("batch: the page size must be a multiple of 8");
}

}  // namespace

std::unique_ptr<Batch> batch_of(std::vector<Row> rows, int64_t page_size) {
  check_page(page_size);
  auto b = std::make_unique<Batch>();
  std::vector<std::optional<Integers>> parents;
  int64_t widest = 0;
  for (const Row& row : rows) widest = std::max(widest, static_cast<int64_t>(std::get<2>(row).size()));
  b->offsets.push_back(0);
  for (Row& row : rows) {
    auto& [start, tokens, pages, positions, hi, tree] = row;
    const int64_t n = static_cast<int64_t>(tokens.size());
    const auto fits = [&](const std::optional<Integers>& x) { return !x || static_cast<int64_t>(x->size()) == n; };
    if (start < 0 || n < 1 || (start + n - 1) / page_size >= static_cast<int64_t>(pages.size()) || !fits(positions) || !fits(hi) ||
        !fits(tree))
      throw std::invalid_argument("batch: tokens, pages, positions, ends and parents of a row do not fit each other");
    b->tokens.insert(b->tokens.end(), tokens.begin(), tokens.end());
    for (int64_t at = start; at < start + n; ++at) {
      const size_t i = static_cast<size_t>(at - start);
      b->positions.push_back(positions ? (*positions)[i] : at);
      b->hi.push_back(hi ? (*hi)[i] : at + 1);
      b->slots.push_back(pages[static_cast<size_t>(at / page_size)] * page_size + at % page_size);
    }
    b->table.insert(b->table.end(), pages.begin(), pages.end());
    b->table.resize(b->table.size() + static_cast<size_t>(widest) - pages.size());
    b->starts.push_back(start);
    b->offsets.push_back(static_cast<int64_t>(b->tokens.size()));
    parents.push_back(std::move(tree));
  }
  b->lo.assign(b->tokens.size(), 0);
  BatchView view{};
  view.positions = b->positions.data(), view.lo = b->lo.data(), view.hi = b->hi.data(), view.slots = b->slots.data();
  view.page_table = b->table.data(), view.pages = widest, view.page_size = page_size;
  return finished(std::move(b), view, parents);
}

std::unique_ptr<Batch> batch_over(Integers offsets, Integers starts, const int64_t* positions, const int64_t* lo,
                                  const int64_t* hi, const int64_t* slots, const int64_t* page_table, int64_t pages,
                                  int64_t page_size, const std::vector<std::optional<Integers>>& parents) {
  check_page(page_size);
  if (offsets.size() != starts.size() + 1) throw std::invalid_argument("batch: offsets and starts do not fit each other");
  auto b = std::make_unique<Batch>();
  b->offsets = std::move(offsets), b->starts = std::move(starts);
  BatchView view{};
  view.positions = positions, view.lo = lo, view.hi = hi, view.slots = slots;
  view.page_table = page_table, view.pages = pages, view.page_size = page_size;
  return finished(std::move(b), view, parents);
}

}  // namespace ridgeline
