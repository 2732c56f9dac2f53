// The scalar twin: plain loops, one query row after another. Also holds what is the same for every instruction set.
#include "attention_mask.h"
#include "attention_merge.h"
#include "small_kernels.h"
#include "vec1.h"

namespace ridgeline {
namespace {

template <class T>
void row_chunk(const AttentionTask& task, const Visibility& visible, int64_t token, int64_t head, int64_t c,
    float* weight,
               float* m, float* l, float* acc) {
  const float* q = task.q + token * task.q_token + head * task.q_head;
  *m = -__builtin_inff(), *l = 0;
  for (int64_t i = 0; i < task.dv; ++i) acc[i] = 0;
  uint64_t seen[kChunk / 64];
  for (int64_t w = 0; w < kChunk / 64; ++w) seen[w] = visible(token, c * kChunk + w * 64);
  for (int64_t i = 0; i < kChunk; ++i) {
    if (!(seen[i / 64] >> (i % 64) & 1)) continue;
    const int64_t j = c * kChunk + i, page = task.pages[j / task.page_size], row = j % task.page_size;
    const T* k = static_cast<const T*>(task.k) + page * task.k_page + row * task.d;
    float s = 0;
    for (int64_t x = 0; x < task.d; ++x) s += q[x] * task.scale * Vec1::load(k + x);
    if constexpr (__is_same(T, int8_t)) s *= task.k_scale[page * task.scale_page + row];
    if (task.softcap > 0) s = task.softcap * tanh_of<Vec1>(s / task.softcap);
    weight[i] = s;
    if (s > *m) *m = s;
  }
  const float shift = *m == -__builtin_inff() ? 0.0f : *m;
  for (int64_t i = 0; i < kChunk; ++i) {
    if (!(seen[i / 64] >> (i % 64) & 1)) continue;
    const int64_t j = c * kChunk + i, page = task.pages[j / task.page_size], row = j % task.page_size;
    const T* v = static_cast<const T*>(task.v) + page * task.v_page + row * task.dv;
    float p = exp_of<Vec1>(weight[i] - shift);
    *l += p;
    if constexpr (__is_same(T, int8_t)) p *= task.v_scale[page * task.scale_page + row];
    for (int64_t x = 0; x < task.dv; ++x) acc[x] += p * Vec1::load(v + x);
  }
}

void row_chunk(const AttentionTask& task, const Visibility& visible, int64_t token, int64_t head, int64_t c,
    float* weight,
               float* m, float* l, float* acc) {
  switch (task.type) {
    case KvType::f32: return row_chunk<float>(task, visible, token, head, c, weight, m, l, acc);
    case KvType::bf16: return row_chunk<Bf16>(task, visible, token, head, c, weight, m, l, acc);
    case KvType::f16: return row_chunk<F16>(task, visible, token, head, c, weight, m, l, acc);
    case KvType::i8: return row_chunk<int8_t>(task, visible, token, head, c, weight, m, l, acc);
  }
}

void part(const AttentionTask& task, int64_t first, int64_t last, int64_t c, float* scratch, float* m, float* l,
          float* acc) {
  const Visibility visible(task);
  for (int64_t t = first; t < last; ++t)
    for (int64_t g = 0; g < task.group; ++g) {
      const int64_t row = (t - first) * task.group + g;
      row_chunk(task, visible, t, g, c, scratch, m + row, l + row, acc + row * task.dv);
    }
}

void whole(const AttentionTask& task, int64_t first, int64_t last, float* scratch) {
  const Visibility visible(task);
  float *acc = scratch + kChunk, *total = acc + padded16(task.dv);
  for (int64_t t = first; t < last; ++t)
    for (int64_t g = 0; g < task.group; ++g) {
      float mt = -__builtin_inff(), lt = 0, m, l;
      for (int64_t i = 0; i < task.dv; ++i) total[i] = 0;
      for (int64_t c = visible.begin(t) / kChunk; c * kChunk < visible.end(t); ++c) {
        row_chunk(task, visible, t, g, c, scratch, &m, &l, acc);
        Merge<Vec1>::add(mt, lt, total, m, l, acc, task.dv);
      }
      Merge<Vec1>::finish(task, t * task.group + g, mt, lt, total, task.dv);
    }
}

}  // namespace

void attention_keys(const AttentionTask& task, int64_t first, int64_t last, int64_t* begin, int64_t* end) {
  const Visibility visible(task);
  *begin = task.context, *end = 0;
  for (int64_t t = first; t < last; ++t) {
    *begin = smaller(*begin, visible.begin(t));
    *end = larger(*end, visible.end(t));
  }
}

void attention_chunks(const AttentionTask& task, int64_t first, int64_t last, int64_t* first_chunk,
    int64_t* last_chunk) {
  int64_t begin, end;
  attention_keys(task, first, last, &begin, &end);
  *first_chunk = begin / kChunk;
  *last_chunk = larger(*first_chunk, (end + kChunk - 1) / kChunk);
}

const AttentionKernels* scalar_attention() {
  using S = Vec1;
  static const AttentionKernels table{
      "scalar", false,
      rms_norm<S, false>, rms_norm<S, true>, layer_norm<S, false>, layer_norm<S, true>,
      rope<S>, hadamard<S>, act_mul<S>, store_kv<S>,
      part, combine<S>, whole};
  return &table;
}

}  // namespace ridgeline
