// From GGUF rows to tiles of 16 rows (see packed.h for the layout), without loss, and back.
#pragma once
#include "api.h"

namespace ridgeline {

// Columns and bytes of one GGUF block of a kind (1 column for float kinds).
struct Source {
  int32_t cols, bytes;
};

constexpr Source source(Kind kind) {
  switch (kind) {
    case Kind::q4_0: return {32, 18};
    case Kind::q4_1: return {32, 20};
    case Kind::q5_0: return {32, 22};
    case Kind::q5_1: return {32, 24};
    case Kind::q8_0: return {32, 34};
    case Kind::q2_k: return {256, 84};
    case Kind::q3_k: return {256, 110};
    case Kind::q4_k: return {256, 144};
    case Kind::q5_k: return {256, 176};
    case Kind::q6_k: return {256, 210};
    case Kind::iq4_nl: return {32, 18};
    case Kind::iq4_xs: return {256, 136};
    case Kind::f16:
    case Kind::bf16: return {1, 2};
    default: return {1, 4};
  }
}

// Bytes that one tile of a matrix of `cols` columns takes in each region.
constexpr int64_t tile_quants(Kind kind, int64_t cols) { return (cols + kBlock - 1) / kBlock * layout(kind).quants; }
constexpr int64_t tile_scales(Kind kind, int64_t cols) {
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  return (blocks + layout(kind).super - 1) / layout(kind).super * layout(kind).scales;
}

// Packs tiles first_tile <= t < last_tile of the matrix whose row n starts at rows + n * row_bytes (any alignment).
// cols must be a multiple of source(kind).cols. quants and scales are the beginning of the whole matrix; rows from
// n_rows to the end of the last tile become zeros with scale zero. Tiles are independent: call it from many threads.
void pack_tiles(Kind kind, const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t first_tile,
                int64_t last_tile, uint8_t* quants, uint8_t* scales);

// Quantises rows of floats (kind from: f32, f16 or bf16, row n at rows + n * row_bytes) to q8_0 in the packed layout:
// one fp16 scale (largest magnitude / 127) per 32 columns, rounded to nearest even. Any cols.
void quantise_tiles(Kind from, const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t first_tile,
                    int64_t last_tile, uint8_t* quants, uint8_t* scales);

// A q8_0 tile of `bytes` bytes of quants into its planes of high and of low nibbles (see SplitHead).
void split_tile(const uint8_t* quants, int64_t bytes, uint8_t* high, uint8_t* low);

// Row `row` of a packed matrix as fp32 (w.cols values), bit for bit what ggml's dequantisation of the source gives.
void unpack_row(const Weights& w, int64_t row, float* out);

}  // namespace ridgeline
