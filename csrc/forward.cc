// A whole pass in one call: between two kernels of a decoding step the interpreter would find its own code and data pushed out
// of the caches by the weights.
#include "blocks.h"
#include "pack.h"

namespace ridgeline {

void Engine::lookup(const Matrix& m, const int64_t* ids, int64_t count, float* out) {
  trace.begin(-1, count);
  const size_t bytes = m.split() ? static_cast<size_t>(m.planes().blocks() * 2 * kPlane) : 0;
  tiles_.need(static_cast<size_t>(team.size()) * bytes);
  const auto rows = [&](int64_t first, int64_t last, int thread) {
    uint8_t* tile = tiles_.data() + static_cast<size_t>(thread) * bytes;
    for (int64_t i = first; i < last; ++i) {
      if (!m.split()) {
        unpack_row(m.view(), ids[i], out + i * m.cols);
        continue;
      }
      const int64_t t = ids[i] / kTile;
      isa.kernels->head_tile(m.planes(), t, tile);
      unpack_row({Kind::q8_0, kTile, m.cols, tile, m.scales.data() + t * m.planes().blocks() * 32}, ids[i] % kTile, out + i * m.cols);
    }
  };
  if (count < 8) rows(0, count, 0);
  else team.run([&](int thread) {
    const Range r = share(count, thread, team.size());
    rows(r.first, r.last, thread);
  });
  trace.end(Part::embed);
}

void Engine::forward(const Model& model, const int64_t* ids, const BatchView& batch, const KvView* kv, const Rope* rope,
                     const std::vector<int64_t>* wanted, float* out) {
  const int64_t hidden = model.embedding->cols, tokens = batch.tokens;
  hidden_.need(static_cast<size_t>(tokens * hidden) * 4);
  float* x = hidden_.as<float>();
  lookup(*model.embedding, ids, tokens, x);
  if (model.scale != 1.0f)
    for (int64_t i = 0; i < tokens * hidden; ++i) x[i] *= model.scale;
  note_pass(model, tokens);
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    const auto [attention, mlp] = model.blocks[i];
    run(*attention, x, batch, kv[i], rope[i], [&](int thread) { expect(thread, mlp->up, tokens); });
    const AttentionBlock* next = i + 1 < model.blocks.size() ? model.blocks[i + 1].first : nullptr;
    run(*mlp, x, tokens, [&](int thread) {
      if (next) expect(thread, *next, tokens);
      else expect(thread, head_start_);
    });
  }
  if (!wanted) return run(model.norm, x, tokens, hidden, out);
  trace.begin(-1, static_cast<int64_t>(wanted->size()));
  for (const int64_t row : *wanted) normalise(model.norm, x + row * hidden, hidden, out), out += hidden;
  trace.end(Part::final_norm);
}

int64_t Engine::best(const Model& model, const int64_t* ids, const BatchView& batch, const KvView* kv, const Rope* rope,
                     const std::vector<int64_t>* wanted, const Linear& head, bool prune, int64_t* tokens) {
  const int64_t rows = wanted ? static_cast<int64_t>(wanted->size()) : batch.tokens;
  wanted_.need(static_cast<size_t>(rows * model.embedding->cols) * 4);
  float* x = wanted_.as<float>();
  forward(model, ids, batch, kv, rope, wanted, x);
  if (prune) return greedy(head, x, rows, tokens);
  argmax(head, x, rows, tokens);
  return head.matrix->rows;
}

}  // namespace ridgeline
