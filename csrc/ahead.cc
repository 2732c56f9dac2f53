// What threads ask for while they wait: see Ahead.
#include <algorithm>

#include "blocks.h"

namespace ridgeline {
namespace {

// The waits of a layer last microseconds, those for the interpreter hundreds of them. What is fetched for the latter must
// stay in the L3 cache until it is read.
constexpr int64_t kStart = 64 << 10, kGap = 8 << 20;
constexpr int64_t kFew = 12;      // rows up to which products wait for memory

// Up to `bytes` from a tile on, of every region.
template <class Add>
int64_t start_of(const Weights& w, int64_t tile, int64_t bytes, const Add& add) {
  const Layout l = layout(w.kind);
  const int64_t quants = w.blocks() * l.quants, scales = w.supers() * l.scales;
  const int64_t tiles = std::clamp<int64_t>((bytes + quants - 1) / quants, 0, w.tiles() - tile);
  const auto part = [&](const uint8_t* region, int64_t size) {
    if (region && size) add(Span{region + tile * size, region + (tile + tiles) * size});
  };
  part(w.quants, quants), part(w.low, quants), part(w.scales, scales);
  return tiles * (quants + scales);
}

}  // namespace

// With fewer rows than threads some wait while others norm a row; one of them fetches the start of the first thread's part too.
void Engine::expect(int thread, const Linear& linear, int64_t rows) {
  Ahead& ahead = team.ahead(thread);
  const Weights w = linear.matrix->view();
  const int threads = team.size();
  const auto start = [&](int t) {
    start_of(w, 2 * share((w.tiles() + 1) / 2, t, threads).first, kStart, [&](Span span) { ahead.add(span); });
  };
  ahead.clear();
  start(thread);
  if (rows < threads && thread == 1) start(0);
}

void Engine::expect(int thread, const AttentionBlock& block, int64_t rows) {
  Ahead& ahead = team.ahead(thread);
  const Linear* linears[] = {&block.q, &block.k, &block.v};
  int64_t tiles = 0;
  for (const Linear* l : linears) tiles += l->matrix->view().tiles();
  const auto start = [&](int t) {
    int64_t tile = share(tiles, t, team.size()).first;
    for (const Linear* l : linears) {
      const Weights w = l->matrix->view();
      if (tile < w.tiles()) {
        start_of(w, tile, kStart, [&](Span span) { ahead.add(span); });
        break;
      }
      tile -= w.tiles();
    }
  };
  ahead.clear();
  start(thread);
  if (rows < team.size() && thread == 1) start(0);
}

// The keys and values that a thread's first item begins with, of decoding rows.
void Engine::expect(int thread, const AttentionBlock& block, const BatchView& batch, const KvView& kv) {
  Ahead& ahead = team.ahead(thread);
  ahead.clear();
  if (batch.tokens != batch.rows) return;
  const int64_t row = thread / block.kv_heads % batch.rows, head = thread % block.kv_heads;
  const int64_t bytes = kv_bytes(kv.type), page_bytes = batch.page_size * kv.d * bytes;
  const int64_t first = batch.lo[row] / batch.page_size, pages = (kStep + batch.page_size - 1) / batch.page_size;
  const int64_t last = std::min((batch.hi[row] + batch.page_size - 1) / batch.page_size, first + pages);
  for (const void* region : {kv.k, kv.v})
    for (int64_t p = first; p < last; ++p) {
      const auto* at = static_cast<const uint8_t*>(region) +
                       (batch.page_table[row * batch.pages + p] * kv.heads + head) * page_bytes;
      ahead.add({at, at + page_bytes});
    }
}

void Engine::note_head(const Weights& w, int64_t rows, int parts) {
  head_start_.clear();
  if (rows > kFew) return;
  for (int i = 0; i < parts; ++i)
    start_of(w, 2 * share((w.tiles() + 1) / 2, i, parts).first, kGap / 2 / parts, [&](Span span) { head_start_.push_back(span); });
}

void Engine::note_pass(const Model& model, int64_t rows) {
  pass_start_.clear();
  if (rows > kFew) return;
  int64_t left = kGap;
  for (const auto& [attention, mlp] : model.blocks)
    for (const Linear* l : {&attention->q, &attention->k, &attention->v, &attention->o, &mlp->up, &mlp->gate, &mlp->down}) {
      if (left <= 0) return;
      if (l->matrix) left -= start_of(l->matrix->view(), 0, left, [&](Span span) { pass_start_.push_back(span); });
    }
}

void Engine::expect(int thread, const std::vector<Span>& noted) {
  Ahead& ahead = team.ahead(thread);
  ahead.clear();
  if (thread == 0) return;                 // the caller, who goes on with something else
  for (size_t i = static_cast<size_t>(thread) - 1; i < noted.size(); i += static_cast<size_t>(team.size()) - 1) ahead.add(noted[i]);
}

}  // namespace ridgeline
