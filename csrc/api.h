// Plain data and the table of kernels that one instruction set provides. No torch, no Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ridgeline {

// How a weight matrix is stored. Quantised kinds hold 16 output rows side by side ("tile"), 32 columns a block.
enum class Kind : int32_t {
  q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs,  // integer dot products
  f16, bf16, f32,                                                              // floating point
  count,                                                                       // of the kinds that a file has
  q8_split,                                                                    // q8_0 by nibble planes: see SplitHead
  i4_32, i4_64, i4_128, i8_32, i8_128,   // integers with an fp32 scale and a zero for 32, 64 or 128 columns
};

constexpr int kTile = 16;    // output rows of a tile: one 512-bit vector of fp32
constexpr int kBlock = 32;   // columns that share an activation scale
constexpr int kGroup = 4;    // columns of one vpdpbusd lane

// What a kind's two regions take for one tile: `quants` bytes a block of 32 columns, and `scales` bytes a superblock of
// `super` blocks. Both regions are contiguous over the blocks of a tile, tile after tile.
struct Layout {
  int32_t quants, scales, super;
};

constexpr Layout layout(Kind kind) {
  switch (kind) {
    case Kind::q4_0: return {256, 32, 1};
    case Kind::q4_1: return {256, 64, 1};
    case Kind::q5_0: return {320, 32, 1};
    case Kind::q5_1: return {320, 64, 1};
    case Kind::q8_0: return {512, 32, 1};
    case Kind::q2_k: return {128, 64 + 8 * 32, 8};
    case Kind::q3_k: return {192, 32 + 8 * 32, 8};
    case Kind::q4_k: return {256, 64 + 8 * 32, 8};
    case Kind::q5_k: return {320, 64 + 8 * 32, 8};
    case Kind::q6_k: return {384, 32 + 8 * 32, 8};
    case Kind::iq4_nl: return {256, 32, 1};
    case Kind::iq4_xs: return {256, 32 + 8 * 16, 8};
    case Kind::q8_split: return {256, 32, 1};
    case Kind::i4_32: return {256, 64 + 16, 1};
    case Kind::i4_64: return {256, 64 + 16, 2};
    case Kind::i4_128: return {256, 64 + 16, 4};
    case Kind::i8_32: return {512, 64 + 16, 1};
    case Kind::i8_128: return {512, 64 + 16, 4};
    case Kind::f16: return {32 * 16 * 2, 0, 1};
    case Kind::bf16: return {32 * 16 * 2, 0, 1};
    default: return {32 * 16 * 4, 0, 1};
  }
}

// One fp32 scale and one signed 8-bit zero for the columns of a superblock: what AWQ, GPTQ and compressed-tensors hold.
constexpr bool is_grouped(Kind kind) {
  return kind == Kind::i4_32 || kind == Kind::i4_64 || kind == Kind::i4_128 || kind == Kind::i8_32 || kind == Kind::i8_128;
}
constexpr bool is_grouped4(Kind kind) { return is_grouped(kind) && layout(kind).quants == 256; }

// A packed matrix (rows x cols); rows are padded to whole tiles and cols to whole blocks, both with zeros.
struct Weights {
  Kind kind;
  int64_t rows, cols;
  const uint8_t* quants;   // 64-byte aligned
  const uint8_t* scales;
  const uint8_t* low = nullptr;   // q8_split: the plane of low nibbles; quants is that of the high ones
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
  int64_t blocks() const { return (cols + kBlock - 1) / kBlock; }
  int64_t supers() const { return (blocks() + layout(kind).super - 1) / layout(kind).super; }
};

// Activations of `rows` tokens, quantised per 32 columns: x ~ scale * q. sums are of q over 16 columns each.
struct Acts {
  const int8_t* q;         // rows x stride
  const float* scale;      // rows x stride / 32
  const int32_t* sum;      // rows x stride / 16
  int64_t rows, stride;    // stride: columns padded to 32
};

// A q8_0 matrix whose bytes are cut in halves, 256 bytes a block of a tile each: in `high` the high nibbles, laid out like
// q4_0, in `low` the low ones by quads of rows. So the best rows of a product read all high nibbles and few low ones.
//
// Quad i of a tile is its rows i, i + 4, i + 8 and i + 12. A line of 64 bytes has a block of a quad, 16 bytes of each row:
// column c in the low half of byte c, column 16 + c in its high half: low[tile][block][quad]. Transposing 4 x 4 words within
// the 128-bit lanes of a block's four lines gives the vectors of q4_0. Lines of a quad one after the other for 2 blocks or
// more would suit readers of single quads, but a product that reads four places side by side loses 7 to 20 % at one row.
struct SplitHead {
  int64_t rows, cols;
  const uint8_t *high, *low, *scales;
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
  int64_t blocks() const { return (cols + kBlock - 1) / kBlock; }
};
constexpr int64_t kPlane = 256;   // bytes of a block of one plane
constexpr int64_t kQuads = 4;     // of a tile

// What a block of one row of activations brings to scores from the planes: see kernels/head.h.
struct HeadFactors {
  float dot, offset, bound;       // high plane: of sum(h q), of S, of |S|
  float scale, middle, width;     // low plane: of sum(l q), of S, of |S|
};

struct Kernels {
  const char* name;
  // x (cols) -> q, scale per 32, sum per 16; columns up to the next multiple of 32 become zero.
  void (*quantise)(const float* x, int64_t cols, int8_t* q, float* scale, int32_t* sum);
  // out[r, t * 16 ..] = acts[r] . W[rows of tile t] for tiles first <= t < last; out has `ld` floats a row.
  void (*gemm)(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld);
  // The same from fp32 activations (row r at x + r * stride, w.cols values), every kind: fp32 arithmetic on exactly the
  // dequantised weights.
  void (*gemm_float)(const Weights& w, const float* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
                     float* out, int64_t ld);
  // The same from bf16 activations and kind bf16 alone: exact products, fp32 sums.
  void (*gemm_bf16)(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
                    float* out, int64_t ld);
  // Scores of tiles first <= t < last from the high plane alone, for each row r of x: score[r * score_ld + 16 (t - first) + i]
  // is the likely one; upper[r * ld + 16 t + i] at least the exact one that gemm gives, -infinity for rows that do not exist.
  // broken[r] becomes true where an upper is NaN or +infinity. factors: rows x blocks. At most 4 rows and 16,384 columns.
  // Null where an instruction set has no such kernels.
  void (*head_bounds)(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
                      int64_t score_ld, float* upper, int64_t ld, bool* broken);
  // Quads (4 tile + i) of tiles first <= t < last with an upper of at least bar[r] in a row r; ascending. Returns how many.
  int64_t (*head_doubtful)(const float* upper, int64_t ld, int64_t rows, const float* bar, int64_t first, int64_t last,
                           int32_t* quads);
  // Brings blocks first <= b < last of the low plane into the uppers of `count` quads. Keeps, in order, the quads that stay
  // doubtful; returns how many.
  int64_t (*head_refine)(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last,
                         int32_t* quads, int64_t count, float* upper, int64_t ld, const float* bar);
  // The largest of n values, the first of equals: *best and *at go from what they were to it if it is larger than *best.
  // Values are at offset + i of the row. Returns whether all values were finite.
  bool (*row_max)(const float* x, int64_t n, int64_t offset, float* best, int64_t* at);
  // Of n values those that are at least `least` go to scores and their places, offset + i, to ids, in order; there is room
  // for n + 16. Returns how many; *broken becomes true at a NaN or +infinity.
  int64_t (*collect)(const float* x, int64_t n, int64_t offset, float least, float* scores, int32_t* ids, bool* broken);
  // The q8_0 quants of one tile from its two planes.
  void (*head_tile)(const SplitHead& w, int64_t tile, uint8_t* quants);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace ridgeline
