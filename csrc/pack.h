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

constexpr bool quantises_to(Kind kind) { return kind == Kind::q8_0 || kind == Kind::q4_0; }

// Quantises rows of floats (kind from: f32, f16 or bf16, row n at rows + n * row_bytes) in the packed layout. Any cols.
// To q8_0: one fp16 scale (largest magnitude / 127) per 32 columns, rounded to nearest even. To q4_0: the scale per 32
// columns with the least squared error of a search (see quantise4.h).
void quantise_tiles(Kind from, Kind to, const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t first_tile,
                    int64_t last_tile, uint8_t* quants, uint8_t* scales);

// A matrix as unsigned codes, row after row, with a scale and a zero for each `group` columns of a row (`groups` of them,
// the last may be short): w = scale * (code - 8 - zero) of four-bit codes, scale * (code - 128 - zero) of eight-bit ones.
struct Codes {
  const uint8_t* codes;    // rows x cols
  const float* scales;     // rows x groups
  const int8_t* zeros;     // rows x groups
  int64_t rows, cols, group, groups;
};

constexpr bool takes_codes(Kind kind) { return is_grouped(kind) || kind == Kind::q4_0 || kind == Kind::q8_0; }

// Packs tiles of codes into a kind that takes them; `group` is a multiple of the columns that share a scale in it, or at
// least cols. q4_0 and q8_0 have no zeros, and scales that fp16 holds.
void pack_codes(Kind kind, const Codes& from, int64_t first_tile, int64_t last_tile, uint8_t* quants, uint8_t* scales);

// A q8_0 tile of `bytes` bytes of quants into its planes of high and of low nibbles (see SplitHead).
void split_tile(const uint8_t* quants, int64_t bytes, uint8_t* high, uint8_t* low);

// Row `row` of a packed matrix as fp32 (w.cols values), bit for bit what ggml's dequantisation of the source gives.
void unpack_row(const Weights& w, int64_t row, float* out);

}  // namespace ridgeline
