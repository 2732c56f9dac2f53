#include "blocks.h"

#include <algorithm>
#include <cstring>

namespace ridgeline {
namespace {

int64_t round32(int64_t n) { return (n + 31) / 32 * 32; }

// Round to nearest even.
uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A mask of the precisions that some products need.
int needs(std::initializer_list<const Linear*> linears) {
  int mask = 0;
  for (const Linear* l : linears)
    if (l->matrix) mask |= 1 << static_cast<int>(precision_of(*l));
  return mask;
}

}  // namespace

Precision precision_of(const Linear& linear) {
  const Kind kind = linear.matrix->kind;
  const bool floats = kind == Kind::f16 || kind == Kind::bf16 || kind == Kind::f32;
  if (!floats) return linear.precision == Precision::i8 ? Precision::i8 : Precision::f32;
  return kind == Kind::bf16 && linear.precision != Precision::f32 ? Precision::bf16 : Precision::f32;
}

Engine::Input Engine::input(int slot, int64_t rows, int64_t cols) {
  const int64_t stride = round32(cols);
  const int64_t n = rows * stride;
  Buffer& b = inputs_[slot];
  b.need(static_cast<size_t>(n) * (4 + 1 + 2) + static_cast<size_t>(n / 32 * 4 + n / 16 * 4) + 512);
  Input in;
  in.rows = rows, in.cols = cols, in.stride = stride;
  in.x = b.as<float>();
  in.q = reinterpret_cast<int8_t*>(in.x + n);
  in.half = reinterpret_cast<uint16_t*>(in.q + n);
  in.scale = reinterpret_cast<float*>(in.half + n);
  in.sum = reinterpret_cast<int32_t*>(in.scale + n / 32);
  return in;
}

// This thread's share of rows, normalised and brought to the forms in `mask`. Where no product reads fp32, it is not kept:
// 4 KB less a row of 1,024 to write to memory that the weights have long pushed out of the caches.
void Engine::normalise_rows(const Norm& norm, const float* x, const Input& in, int mask, int thread) {
  const Range rows = share(in.rows, thread, team.size());
  const bool kept = mask >> static_cast<int>(Precision::f32) & 1;
  float* own = normal_.as<float>() + thread * in.stride;
  for (int64_t r = rows.first; r < rows.last; ++r) {
    float* row = kept ? in.x + r * in.stride : own;
    normalise(norm, x + r * in.cols, in.cols, row);
    for (int p = 0; p < 2; ++p)
      if (mask >> p & 1) convert(in, static_cast<Precision>(p), row, r, 0, in.stride / kBlock);
  }
}

// Blocks [first_block, last_block) of 32 columns of one row, from in.x to another form.
void Engine::prepare(const Input& in, Precision precision, int64_t row, int64_t first_block, int64_t last_block) const {
  convert(in, precision, in.x + row * in.stride, row, first_block, last_block);
}

void Engine::convert(const Input& in, Precision precision, const float* x, int64_t row, int64_t first_block,
                     int64_t last_block) const {
  const int64_t a = first_block * kBlock, b = std::min(in.cols, last_block * kBlock);
  if (precision == Precision::i8) {
    isa.kernels->quantise(x + a, b - a, in.q + row * in.stride + a, in.scale + row * (in.stride / kBlock) + first_block,
                          in.sum + row * (in.stride / 16) + 2 * first_block);
  } else if (precision == Precision::bf16) {
    for (int64_t i = a; i < b; ++i) in.half[row * in.stride + i] = to_bf16(x[i]);
  }
}

void Engine::multiply(const Linear& linear, const Input& in, int64_t first, int64_t last, float* out, int64_t ld) const {
  if (first >= last) return;
  const Weights w = linear.matrix->view();
  switch (precision_of(linear)) {
    case Precision::i8: isa.kernels->gemm(w, {in.q, in.scale, in.sum, in.rows, in.stride}, first, last, out, ld); break;
    case Precision::bf16: isa.kernels->gemm_bf16(w, in.half, in.rows, in.stride, first, last, out, ld); break;
    default: isa.kernels->gemm_float(w, in.x, in.rows, in.stride, first, last, out, ld); break;
  }
  if (linear.bias.empty()) return;
  const int64_t a = first * kTile, b = std::min(w.rows, last * kTile);
  for (int64_t r = 0; r < in.rows; ++r)
    for (int64_t i = a; i < b; ++i) out[r * ld + i] += linear.bias[i];
}

// This thread's share of rows, brought into the form that a product needs.
void Engine::take(const Input& in, const float* x, Precision precision, int thread) const {
  const Range mine = share(in.rows, thread, team.size());
  for (int64_t r = mine.first; r < mine.last; ++r) {
    const float* row = x + r * in.cols;
    if (precision == Precision::f32) std::memcpy(in.x + r * in.stride, row, in.cols * sizeof(float));
    else convert(in, precision, row, r, 0, in.stride / kBlock);
  }
}

void Engine::normalise(const Norm& norm, const float* x, int64_t n, float* out) const {
  switch (norm.form) {
    case Norm::rms: return isa.attention->rms_norm(x, norm.weight.data(), n, norm.eps, out);
    case Norm::layer:
      return isa.attention->layer_norm(x, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(), n, norm.eps, out);
    default: std::memcpy(out, x, n * sizeof(float));
  }
}

// x += norm(y)
void Engine::finish(const Norm& after, const float* y, int64_t n, float* x) const {
  switch (after.form) {
    case Norm::rms: return isa.attention->rms_norm_add(y, after.weight.data(), n, after.eps, x);
    case Norm::layer:
      return isa.attention->layer_norm_add(y, after.weight.data(), after.bias.empty() ? nullptr : after.bias.data(), n,
                                           after.eps, x);
    default:
      for (int64_t i = 0; i < n; ++i) x[i] += y[i];
  }
}

void Engine::run(const Norm& norm, const float* x, int64_t rows, int64_t n, float* out) {
  trace.begin(-1, rows);
  const auto work = [&](int thread) {
    const Range r = share(rows, thread, team.size());
    for (int64_t i = r.first; i < r.last; ++i) normalise(norm, x + i * n, n, out + i * n);
  };
  if (rows == 1) normalise(norm, x, n, out);
  else team.run(work);
  trace.end(Part::final_norm);
}

void Engine::run(const Linear& linear, const float* x, int64_t rows, float* out, int64_t ld) {
  const int64_t cols = linear.matrix->cols;
  note_head(linear.matrix->view(), rows, team.size());
  trace.begin(-1, rows);
  const Input in = input(0, rows, cols);
  const int64_t tiles = linear.matrix->view().tiles();
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier(thread);
    const Range t = share((tiles + 1) / 2, thread, team.size());
    multiply(linear, in, 2 * t.first, std::min(tiles, 2 * t.last), out, ld);
    expect(thread, pass_start_);
  });
  trace.end(Part::head);
}

void Engine::run(const MlpBlock& block, float* x, int64_t tokens, const Then& then) {
  trace.begin(block.layer, tokens);
  const int64_t hidden = block.up.matrix->cols, wide = block.up.matrix->rows;
  const Input in = input(0, tokens, hidden), middle = input(1, tokens, wide);
  const int64_t tiles = block.up.matrix->view().tiles(), down_tiles = block.down.matrix->view().tiles();
  wide_[0].need(static_cast<size_t>(tokens) * middle.stride * 4);
  wide_[1].need(static_cast<size_t>(tokens) * hidden * 4);
  float* gate = wide_[0].as<float>();
  float* y = wide_[1].as<float>();
  const int mask = needs({&block.gate, &block.up});
  normal_.need(static_cast<size_t>(team.size() * in.stride) * 4);
  const Precision down = precision_of(block.down);
  team.run([&](int thread) {
    const int threads = team.size();
    const Range rows = share(tokens, thread, threads);
    normalise_rows(block.before, x, in, mask, thread);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::mlp_norm);
    // Whole pairs of tiles: then a thread's columns are whole blocks, and it can quantise them itself.
    const Range pairs = share((tiles + 1) / 2, thread, threads);
    const int64_t first = 2 * pairs.first, last = std::min(tiles, 2 * pairs.last);
    multiply(block.up, in, first, last, middle.x, middle.stride);
    if (block.gate.matrix) multiply(block.gate, in, first, last, gate, middle.stride);
    const int64_t a = first * kTile, b = std::min(wide, last * kTile);
    for (int64_t r = 0; r < tokens && a < b; ++r) {
      float* u = middle.x + r * middle.stride + a;
      if (block.gate.matrix) isa.attention->act_mul(gate + r * middle.stride + a, u, b - a, u, block.act);
      else isa.attention->act_mul(u, nullptr, b - a, u, block.act);
      prepare(middle, down, r, a / kBlock, (b + kBlock - 1) / kBlock);
    }
    expect(thread, block.down, tokens);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::up);
    const Range out = share((down_tiles + 1) / 2, thread, threads);
    multiply(block.down, middle, 2 * out.first, std::min(down_tiles, 2 * out.last), y, hidden);
    team.ahead(thread).clear();
    if (then) then(thread);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::down);
    for (int64_t r = rows.first; r < rows.last; ++r) finish(block.after, y + r * hidden, hidden, x + r * hidden);
  });
  trace.end(Part::mlp_residual);
}

void Engine::run(const AttentionBlock& block, float* x, const BatchView& batch, const KvView& kv, const Rope& rope,
                 const Then& then) {
  trace.begin(block.layer, batch.tokens);
  const int64_t hidden = block.q.matrix->cols, tokens = batch.tokens, d = block.d;
  const int64_t nq = block.heads * d, nk = block.kv_heads * d, ld = round32(nq + 2 * nk);
  const Input in = input(0, tokens, hidden), mixed = input(1, tokens, nq);
  wide_[0].need(static_cast<size_t>(tokens) * ld * 4);
  wide_[1].need(static_cast<size_t>(tokens) * hidden * 4);
  float* qkv = wide_[0].as<float>();
  float* y = wide_[1].as<float>();
  const int mask = needs({&block.q, &block.k, &block.v});
  normal_.need(static_cast<size_t>(team.size() * in.stride) * 4);
  const int64_t tq = block.q.matrix->view().tiles(), tk = block.k.matrix->view().tiles();
  const int64_t tv = block.v.matrix->view().tiles(), to = block.o.matrix->view().tiles();
  team.run([&](int thread) {
    const int threads = team.size();
    const Range rows = share(tokens, thread, threads);
    normalise_rows(block.before, x, in, mask, thread);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::attention_norm);
    const Range tiles = share(tq + tk + tv, thread, threads);
    const auto part = [&](const Linear& linear, int64_t before, int64_t count, int64_t column) {
      multiply(linear, in, std::clamp<int64_t>(tiles.first - before, 0, count),
               std::clamp<int64_t>(tiles.last - before, 0, count), qkv + column, ld);
    };
    part(block.q, 0, tq, 0);
    part(block.k, tq, tk, nq);
    part(block.v, tq + tk, tv, nq + nk);
    expect(thread, block, batch, kv);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::qkv);
    const int64_t item = block.heads + 2 * block.kv_heads;
    if (block.q_norm.form != Norm::none && !block.norm_heads) {
      for (int64_t r = rows.first; r < rows.last; ++r) {
        normalise(block.q_norm, qkv + r * ld, nq, qkv + r * ld);
        normalise(block.k_norm, qkv + r * ld + nq, nk, qkv + r * ld + nq);
      }
      team.barrier(thread);
    }
    const Range items = share(tokens * item, thread, threads);
    const int64_t bytes = kv_bytes(kv.type);
    for (int64_t i = items.first; i < items.last; ++i) {
      const int64_t t = i / item, h = i % item;
      float* head = qkv + t * ld + h * d;
      const bool is_q = h < block.heads, is_k = !is_q && h < block.heads + block.kv_heads;
      if (block.norm_heads && (is_q || is_k)) normalise(is_q ? block.q_norm : block.k_norm, head, d, head);
      if (block.half && (is_q || is_k)) {
        const int64_t at = (rope.by_position ? batch.positions[t] : t) * block.half;
        isa.attention->rope(head, rope.cos + at, rope.sin + at, block.half);
      }
      if (kv.type == KvType::i8 && (is_q || is_k)) isa.attention->hadamard(head, d);
      if (is_q) continue;
      const int64_t kv_head = is_k ? h - block.heads : h - block.heads - block.kv_heads;
      const int64_t page = batch.slots[t] / batch.page_size, offset = batch.slots[t] % batch.page_size;
      const int64_t slot = (page * kv.heads + kv_head) * batch.page_size + offset;
      float* scale = is_k ? kv.k_scale : kv.v_scale;
      isa.attention->store_kv(head, d, kv.type, static_cast<char*>(is_k ? kv.k : kv.v) + slot * d * bytes,
                              scale ? scale + slot : nullptr);
    }
    team.barrier(thread);
    if (thread == 0) trace.end(Part::heads);
    attend(block, batch, kv, qkv, ld, mixed.x, thread);
    expect(thread, block.o, tokens);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::core);
    const Precision precision = precision_of(block.o);
    for (int64_t r = rows.first; r < rows.last; ++r) prepare(mixed, precision, r, 0, mixed.stride / kBlock);
    team.barrier(thread);
    const Range out = share((to + 1) / 2, thread, threads);
    multiply(block.o, mixed, 2 * out.first, std::min(to, 2 * out.last), y, hidden);
    team.ahead(thread).clear();
    if (then) then(thread);
    team.barrier(thread);
    if (thread == 0) trace.end(Part::out);
    for (int64_t r = rows.first; r < rows.last; ++r) finish(block.after, y + r * hidden, hidden, x + r * hidden);
  });
  trace.end(Part::attention_residual);
}

// Every (row, KV head, tile of tokens) is one item. Items go to threads in turn: later tiles of a prefill see more keys.
// Where a few decoding rows give fewer items than threads, the query heads of a KV head are shared out, and behind long
// contexts the chunks, whose parts are combined in order. Neither changes a bit of the result.
void Engine::attend(const AttentionBlock& block, const BatchView& batch, const KvView& kv, float* qkv, int64_t ld, float* out,
                    int thread) {
  const int threads = team.size();
  const int64_t d = block.d, nq = block.heads * d;
  int64_t group = block.heads / block.kv_heads, shares = 1;        // query heads of an item; items of a KV head
  while (batch.tokens == batch.rows && batch.rows * block.kv_heads * shares < threads && group % 2 == 0) group /= 2, shares *= 2;
  const int64_t step = std::max<int64_t>(1, kRowTile / group);
  const int64_t out_ld = round32(nq), bytes = kv_bytes(kv.type);
  const size_t scratch = static_cast<size_t>(attention_scratch(d, d) + 15) / 16 * 16;
  if (thread == 0) scratch_.need(threads * scratch * 4);
  int64_t whole = 0, longest = 0;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const int64_t n = batch.offsets[r + 1] - batch.offsets[r];
    whole += (n + step - 1) / step * block.kv_heads * shares;
    longest = std::max(longest, batch.starts[r] + n);
  }
  const bool split = whole < 2 * threads && longest > kChunk;
  const int64_t chunks = (longest + kChunk - 1) / kChunk, rows_most = step * group;
  const int64_t part = rows_most * (2 + d);                      // m, l and acc of one chunk of one item
  if (thread == 0 && split) parts_.need(static_cast<size_t>(whole) * chunks * part * 4);
  team.barrier(thread);
  float* own = scratch_.as<float>() + thread * scratch;
  const auto each = [&](auto&& body) {
    int64_t item = 0;
    for (int64_t r = 0; r < batch.rows; ++r) {
      const int64_t a = batch.offsets[r], n = batch.offsets[r + 1] - a;
      for (int64_t part_of = 0; part_of < block.kv_heads * shares; ++part_of) {
        const int64_t h = part_of / shares;
        AttentionTask task{};
        task.q = qkv + a * ld + part_of * group * d, task.q_token = ld, task.q_head = d;
        task.out = out + a * out_ld + part_of * group * d, task.out_token = out_ld, task.out_head = d;
        task.tokens = n, task.group = group, task.d = d, task.dv = d;
        task.scale = block.scale, task.softcap = block.softcap, task.window = block.window;
        task.sinks = block.sinks.empty() ? nullptr : block.sinks.data() + part_of * group;
        task.pages = batch.page_table + r * batch.pages, task.page_size = batch.page_size;
        task.context = batch.starts[r] + n, task.run_start = batch.starts[r];
        task.lo = batch.lo + a, task.hi = batch.hi + a, task.position = batch.positions + a;
        task.ancestors = batch.ancestors ? batch.ancestors[r] : nullptr;
        task.type = kv.type;
        task.bf16_dot = (kv.type == KvType::bf16 || kv.type == KvType::i8) && block.q.precision != Precision::f32;
        task.k = static_cast<char*>(kv.k) + h * batch.page_size * d * bytes;
        task.v = static_cast<char*>(kv.v) + h * batch.page_size * d * bytes;
        task.k_page = task.v_page = kv.heads * batch.page_size * d;
        if (kv.type == KvType::i8) {
          task.k_scale = kv.k_scale + h * batch.page_size, task.v_scale = kv.v_scale + h * batch.page_size;
          task.scale_page = kv.heads * batch.page_size;
        }
        for (int64_t t = 0; t < n; t += step) body(item++, task, t, std::min(n, t + step));
      }
    }
  };
  if (!split) {
    // One item behind, so that the last keys of each are computed while the first ones of the next are fetched: short
    // contexts would wait for memory at each item's beginning.
    AttentionTask held{};
    int64_t held_first = 0, held_last = 0;
    each([&](int64_t item, const AttentionTask& task, int64_t first, int64_t last) {
      if (item % threads != thread) return;
      AttentionAhead ahead{task.k, task.v, task.pages, 0, 0};
      attention_keys(task, first, last, &ahead.begin, &ahead.end);
      held.ahead = &ahead;
      if (held_last) isa.attention->attention(held, held_first, held_last, own);
      const bool few = held_last && (held_last - held_first) * group <= kFewRows;
      held = task, held.fetched = few && ahead.begin < ahead.end, held_first = first, held_last = last;
    });
    held.ahead = nullptr;
    if (held_last) isa.attention->attention(held, held_first, held_last, own);
    return;
  }
  const auto place = [&](int64_t item, int64_t chunk) { return parts_.as<float>() + (item * chunks + chunk) * part; };
  each([&](int64_t item, const AttentionTask& task, int64_t first, int64_t last) {
    int64_t from, to;
    attention_chunks(task, first, last, &from, &to);
    const int64_t rows = (last - first) * group, count = to - from;
    float* base = place(item, 0);                                // m, then l, then acc of the item's chunks
    for (int64_t c = from; c < to; ++c)
      if ((item + c) % threads == thread)
        isa.attention->attention_part(task, first, last, c, own, base + (c - from) * rows, base + (count + c - from) * rows,
                                      base + 2 * count * rows + (c - from) * rows * d);
  });
  team.barrier(thread);
  each([&](int64_t item, const AttentionTask& task, int64_t first, int64_t last) {
    if (item % threads != thread) return;
    int64_t from, to;
    attention_chunks(task, first, last, &from, &to);
    const int64_t rows = (last - first) * group, count = to - from;
    const float* base = place(item, 0);
    isa.attention->attention_combine(task, first, last, count, base, base + count * rows, base + 2 * count * rows);
  });
}

}  // namespace ridgeline
