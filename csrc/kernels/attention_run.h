// What the kernel table calls: all tiles of a call, whole or one chunk of it, by cache type.
#pragma once
#include "attention_tile.h"

namespace ridgeline {
namespace {

template <class S, class T, bool Dot = false>
void part_of(const AttentionTask& task, int64_t first, int64_t last, int64_t c, float* scratch, float* m, float* l,
             float* acc) {
  Tile<S, T, Dot> tile(task, scratch);
  const int64_t end_row = last * task.group;
  for (int64_t row = first * task.group; row < end_row; row += kRowTile) {
    tile.open(row, smaller(kRowTile, end_row - row));
    int64_t begin, end;
    tile.key_range(&begin, &end);
    tile.chunk(c, begin, end, smaller(end, (c + 1) * kChunk), true);
    const int64_t at = row - first * task.group;
    for (int64_t r = 0; r < tile.rows; ++r) {
      m[at + r] = tile.m[r], l[at + r] = tile.l[r];
      __builtin_memcpy(acc + (at + r) * task.dv, tile.acc + r * tile.dvp, static_cast<size_t>(task.dv) * sizeof(float));
    }
  }
}

template <class S, class T, bool Dot = false> void whole_of(const AttentionTask& task, int64_t first, int64_t last,
    float* scratch) {
  Tile<S, T, Dot> tile(task, scratch);
  const int64_t end_row = last * task.group;
  for (int64_t row = first * task.group; row < end_row; row += kRowTile) {
    tile.open(row, smaller(kRowTile, end_row - row));
    int64_t begin, end;
    tile.key_range(&begin, &end);
    for (int64_t r = 0; r < tile.rows; ++r) tile.mt[r] = -__builtin_inff(), tile.lt[r] = 0;
    for (int64_t i = 0; i < tile.rows * tile.dvp; i += S::kLanes) S::store(tile.total + i, S::zero());
    for (int64_t c = begin / kChunk; c * kChunk < end; ++c) {
      tile.chunk(c, begin, end, end, c == begin / kChunk && !task.fetched);
      for (int64_t r = 0; r < tile.rows; ++r)
        Merge<S>::add(tile.mt[r], tile.lt[r], tile.total + r * tile.dvp, tile.m[r], tile.l[r], tile.acc + r * tile.dvp,
                      task.dv);
    }
    for (int64_t r = 0; r < tile.rows; ++r)
      Merge<S>::finish(task, row + r, tile.mt[r], tile.lt[r], tile.total + r * tile.dvp, task.dv);
  }
}

// Dot: this CPU has the dot product of bf16 pairs.
inline bool by_pairs(const AttentionTask& task) {
  const int64_t unit = task.type == KvType::i8 ? 64 : 32;
  return task.bf16_dot && task.d % unit == 0 && task.dv % unit == 0;
}

template <class S, bool Dot>
void part(const AttentionTask& task, int64_t first, int64_t last, int64_t c, float* scratch, float* m, float* l,
          float* acc) {
  switch (task.type) {
    case KvType::f32: return part_of<S, float>(task, first, last, c, scratch, m, l, acc);
    case KvType::bf16:
      if constexpr (Dot)
        if (by_pairs(task)) return part_of<S, Bf16, true>(task, first, last, c, scratch, m, l, acc);
      return part_of<S, Bf16>(task, first, last, c, scratch, m, l, acc);
    case KvType::f16: return part_of<S, F16>(task, first, last, c, scratch, m, l, acc);
    case KvType::i8:
      if constexpr (Dot)
        if (by_pairs(task)) return part_of<S, int8_t, true>(task, first, last, c, scratch, m, l, acc);
      return part_of<S, int8_t>(task, first, last, c, scratch, m, l, acc);
  }
}

template <class S, bool Dot> void whole(const AttentionTask& task, int64_t first, int64_t last, float* scratch) {
  switch (task.type) {
    case KvType::f32: return whole_of<S, float>(task, first, last, scratch);
    case KvType::bf16:
      if constexpr (Dot)
        if (by_pairs(task)) return whole_of<S, Bf16, true>(task, first, last, scratch);
      return whole_of<S, Bf16>(task, first, last, scratch);
    case KvType::f16: return whole_of<S, F16>(task, first, last, scratch);
    case KvType::i8:
      if constexpr (Dot)
        if (by_pairs(task)) return whole_of<S, int8_t, true>(task, first, last, scratch);
      return whole_of<S, int8_t>(task, first, last, scratch);
  }
}

}  // namespace
}  // namespace ridgeline
