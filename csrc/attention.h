// Attention over the paged cache and the small kernels around it: plain data and a table an instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ridgeline {

enum class Act : int32_t { silu, gelu, gelu_tanh, relu };
enum class KvType : int32_t { f32, bf16, f16, i8 };   // i8: one fp32 scale per (token, head), x ~ scale * q

struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

constexpr int64_t kv_bytes(KvType t) { return t == KvType::f32 ? 4 : t == KvType::i8 ? 1 : 2; }

// Keys are taken in steps of kStep (one rescaling of the online softmax) and chunks of kChunk (one partial result).
// Both sit at absolute cache positions, so a token's result depends on nothing else that is computed beside it.
constexpr int64_t kStep = 64;
constexpr int64_t kChunk = 256;

// Keys [begin, end) that the next call will read first, of a cache with the same strides.
struct AttentionAhead {
  const void *k, *v;
  const int64_t* pages;
  int64_t begin, end;
};

// Query tokens of one row against one KV head. Key j is visible to token t iff lo[t] <= j < hi[t], j < context, j is
// before the run or an ancestor of t (bit j - run_start), and, with a window, at(j) > position[t] - window, where at(j)
// is j before the run and position[j - run_start] inside it.
struct AttentionTask {
  const float* q;              // q[t * q_token + g * q_head + i]
  int64_t q_token, q_head;
  float* out;                  // the same form with dv elements
  int64_t out_token, out_head;
  int64_t tokens;              // of the whole run; a kernel call names the ones it computes
  int64_t group;               // query heads of this KV head
  int64_t d, dv;
  float scale;
  float softcap;               // c * tanh(s / c); 0 = none
  const float* sinks;          // (group) or null
  int64_t window;              // 0 = none
  const int64_t* pages;        // page table of the row
  int64_t page_size;           // a multiple of 8
  int64_t context;             // cache positions that exist, the run's own included
  int64_t run_start;           // cache position of the run's first token
  const int64_t* lo;           // (tokens)
  const int64_t* hi;
  const int64_t* position;
  const uint64_t* ancestors;   // (tokens, words) bits over the run's tokens, words = ceil(tokens / 64); or null
  // bf16 or int8 cache, where the kernels have bf16_dot and d and dv are multiples of 32 (int8: 64): queries and
  // weights rounded to bf16, 1.75 times the speed where arithmetic binds; beside int8 to 16-bit integers with a scale a
  // row. A model must keep one choice, or a prefix hit would differ from a miss.
  bool bf16_dot;
  KvType type;
  const void* k;               // this KV head's rows in page 0: row j of page p is at k + p * k_page + j * d elements
  const void* v;
  int64_t k_page, v_page;      // elements from page to page
  const float* k_scale;        // i8 only: scale of row j of page p at k_scale[p * scale_page + j]
  const float* v_scale;
  int64_t scale_page;
  // Of `attention` with few rows: what to fetch while the last keys are computed, or null; and whether the call before
  // this one has fetched this one's first keys. Neither changes a result.
  const AttentionAhead* ahead;
  bool fetched;
};

struct AttentionKernels {
  const char* name;
  bool bf16_dot;               // whether AttentionTask::bf16_dot has an effect
  // out = x / sqrt(mean(x^2) + eps) * weight; weight null = none. out may be x. The _add forms do out += norm(x).
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  void (*rms_norm_add)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // out = (x - mean) / sqrt(variance + eps) * weight + bias; either may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out);
  void (*layer_norm_add)(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out);
  // Half-split rotation of the first 2 * half elements, in place; cos and sin have `half` elements.
  void (*rope)(float* head, const float* cos, const float* sin, int64_t half);
  // Times a Hadamard matrix over the root of its size, block by block of the largest power of two that divides n: keeps
  // products of rows and spreads what lies in few dimensions over all. Queries and keys of an int8 cache go through it:
  // KL of Gemma 3 270M 0.0034 without, 0.0006 with; values would gain 0.0001.
  void (*hadamard)(float* x, int64_t n);
  // out = act(gate) * up; up null = act(gate). out may be gate or up.
  void (*act_mul)(const float* gate, const float* up, int64_t n, float* out, Act act);
  // One row of K or V to the cache's type, round to nearest even; *scale is written for i8 alone.
  void (*store_kv)(const float* x, int64_t n, KvType type, void* out, float* scale);
  // Tokens [first, last) over chunk c (keys [c * kChunk, (c + 1) * kChunk)): for row (t - first) * group + g the
  // maximum m, the sum l of exp(s - m) and acc[row * dv ..] = sum of exp(s - m) v. scratch: attention_scratch() floats,
  // 64-byte aligned.
  void (*attention_part)(const AttentionTask& task, int64_t first, int64_t last, int64_t c, float* scratch, float* m,
                         float* l, float* acc);
  // The parts of consecutive chunks, in ascending order, to task.out: rows = (last - first) * group; part p has m + p *
  // rows, l + p * rows, acc + p * rows * dv. Chunks without a visible key may be left out.
  void (*attention_combine)(const AttentionTask& task, int64_t first, int64_t last, int64_t parts, const float* m,
                            const float* l, const float* acc);
  // All chunks at once: bit for bit what the parts combine to.
  void (*attention)(const AttentionTask& task, int64_t first, int64_t last, float* scratch);
};

constexpr int64_t kRowTile = 96;   // query rows (tokens x group) that share a pass over the keys
constexpr int64_t kFewRows = 16;   // up to so many a tile is bound by memory and fetches ahead

constexpr int64_t padded16(int64_t n) { return (n + 15) / 16 * 16; }
// Floats: queries, transposed keys, scores, two accumulators, m and l of both, corrections, lanes of l.
constexpr int64_t attention_scratch(int64_t d, int64_t dv) {
  return kRowTile * padded16(d) + kStep * padded16(d) + kRowTile * kStep + 2 * kRowTile * padded16(dv) + 21 * kRowTile;
}

// Keys [*begin, *end) that hold every visible one of tokens [first, last); begin >= end: none.
void attention_keys(const AttentionTask& task, int64_t first, int64_t last, int64_t* begin, int64_t* end);
// Chunks [*first_chunk, *last_chunk) that can hold a visible key of tokens [first, last).
void attention_chunks(const AttentionTask& task, int64_t first, int64_t last, int64_t* first_chunk,
    int64_t* last_chunk);

const AttentionKernels* scalar_attention();
const AttentionKernels* avx2_attention();
const AttentionKernels* avx512_attention();

}  // namespace ridgeline
