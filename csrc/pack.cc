#include "pack.h"

#include <algorithm>
#include <cmath>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "packed.h"
#include "quantise4.h"

namespace ridgeline {
namespace {

// ---- one GGUF block of one row -> unsigned codes in column order, and the bytes of its scales
// -------------------------

void split_nibbles(const uint8_t* qs, int n, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < n; ++i) low[i] = qs[i] & 15;
  for (int i = 0; i < n; ++i) high[i] = qs[i] >> 4;
}

void add_bits(const uint8_t* bits, uint8_t* u) {  // bit i of a 32-bit word is the fifth bit of column i
  for (int i = 0; i < 4; ++i) {
    // A copy of the byte in each of eight bytes, one bit kept in each, moved to bit 7 by a carry and then to bit 4.
    const uint64_t kept = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t fifth = (kept + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    const uint64_t joined = load_as<uint64_t>(u + 8 * i) | fifth;
    std::memcpy(u + 8 * i, &joined, 8);
  }
}

// The 6-bit scale and minimum of sub-block j of Q4_K and Q5_K: 12 bytes, j < 4 in the low six bits of bytes j and j +
// 4; j >= 4 as a nibble of byte j + 4 and the top two bits of bytes j - 4 and j.
void six_bits(const uint8_t* p, int j, uint8_t& scale, uint8_t& minimum) {
  if (j < 4) {
    scale = p[j] & 63;
    minimum = p[j + 4] & 63;
  } else {
    scale = static_cast<uint8_t>((p[j + 4] & 15) | p[j - 4] >> 6 << 4);
    minimum = static_cast<uint8_t>(p[j + 4] >> 4 | p[j] >> 6 << 4);
  }
}

template <Kind K>
void decode(const uint8_t* p, uint8_t* u) {
  if constexpr (K == Kind::q8_0)
    for (int i = 0; i < 32; ++i) u[i] = p[2 + i] ^ 128;
  if constexpr (K == Kind::q4_0 || K == Kind::iq4_nl) split_nibbles(p + 2, 16, u, u + 16);
  if constexpr (K == Kind::q4_1) split_nibbles(p + 4, 16, u, u + 16);
  if constexpr (K == Kind::q5_0) split_nibbles(p + 6, 16, u, u + 16), add_bits(p + 2, u);
  if constexpr (K == Kind::q5_1) split_nibbles(p + 8, 16, u, u + 16), add_bits(p + 4, u);
  if constexpr (K == Kind::iq4_xs)
    for (int b = 0; b < 8; ++b) split_nibbles(p + 8 + 16 * b, 16, u + 32 * b, u + 32 * b + 16);
  if constexpr (K == Kind::q4_k)
    for (int b = 0; b < 4; ++b) split_nibbles(p + 16 + 32 * b, 32, u + 64 * b, u + 64 * b + 32);
  if constexpr (K == Kind::q5_k)
    for (int b = 0; b < 4; ++b) {
      split_nibbles(p + 48 + 32 * b, 32, u + 64 * b, u + 64 * b + 32);
      for (int h = 0; h < 2; ++h)
        for (int i = 0; i < 32; ++i)
          u[64 * b + 32 * h + i] |= static_cast<uint8_t>((p[16 + i] >> (2 * b + h) & 1) << 4);
    }
  if constexpr (K == Kind::q6_k)
    for (int n = 0; n < 2; ++n) {  // 128 columns: 64 bytes of nibbles, 32 bytes of two-bit fields
      split_nibbles(p + 64 * n, 64, u + 128 * n, u + 128 * n + 64);
      for (int part = 0; part < 4; ++part)
        for (int i = 0; i < 32; ++i)
          u[128 * n + 32 * part + i] |= static_cast<uint8_t>((p[128 + 32 * n + i] >> 2 * part & 3) << 4);
    }
  if constexpr (K == Kind::q2_k || K == Kind::q3_k) {
    const uint8_t* qs = p + (K == Kind::q2_k ? 16 : 32);
    for (int b = 0; b < 8; ++b)
      for (int i = 0; i < 32; ++i) u[32 * b + i] = qs[32 * (b / 4) + i] >> 2 * (b % 4) & 3;
  }
  if constexpr (K == Kind::q3_k)
    for (int b = 0; b < 8; ++b)
      for (int i = 0; i < 32; ++i) u[32 * b + i] |= static_cast<uint8_t>((p[i] >> b & 1) << 2);
}

// Scales of row r of a tile go to their places in the superblock s.
template <Kind K>
void decode_scales(const uint8_t* p, int r, uint8_t* s) {
  const auto halves = [&](int at, int to) { std::memcpy(s + to + 2 * r, p + at, 2); };
  if constexpr (K == Kind::q8_0 || K == Kind::q4_0 || K == Kind::iq4_nl || K == Kind::q5_0) halves(0, 0);
  if constexpr (K == Kind::q4_1 || K == Kind::q5_1) halves(0, 0), halves(2, 32);
  if constexpr (K == Kind::q4_k || K == Kind::q5_k) {
    halves(0, 0), halves(2, 32);
    for (int b = 0; b < 8; ++b) six_bits(p + 4, b, s[64 + 32 * b + r], s[64 + 32 * b + 16 + r]);
  }
  if constexpr (K == Kind::q2_k) {
    halves(80, 0), halves(82, 32);
    for (int i = 0; i < 16; ++i) s[64 + 16 * i + r] = p[i];
  }
  if constexpr (K == Kind::q6_k) {
    halves(208, 0);
    for (int i = 0; i < 16; ++i) s[32 + 16 * i + r] = p[192 + i];
  }
  if constexpr (K == Kind::q3_k) {  // 16 scales: low nibbles in bytes 0..7, two high bits in bytes 8..11
    halves(108, 0);
    for (int i = 0; i < 16; ++i) {
      const int low = p[96 + i % 8] >> (i < 8 ? 0 : 4) & 15, high = p[104 + i % 4] >> 2 * (i / 4) & 3;
      s[32 + 16 * i + r] = static_cast<uint8_t>((low | high << 4) - 32);
    }
  }
  if constexpr (K == Kind::iq4_xs) {
    halves(0, 0);
    const int high = load_as<uint16_t>(p + 2);
    for (int b = 0; b < 8; ++b) {
      const int low = p[4 + b / 2] >> 4 * (b % 2) & 15;
      s[32 + 16 * b + r] = static_cast<uint8_t>((low | (high >> 2 * b & 3) << 4) - 32);
    }
  }
}

// ---- 16 rows of 32 codes -> the interleaved block
// ---------------------------------------------------------------------

// v[g][r] = word g of row r, for n words of rows `stride` bytes apart.
void transpose(const uint8_t* u, int64_t stride, int n, uint32_t* v) {
#if defined(__SSE2__)
  for (int r = 0; r < kTile; r += 4)  // four rows by four words at a time: half the instructions of the plain loop
    for (int g = 0; g < n; g += 4) {
      const auto row = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(u + (r + i) * stride + 4 * g));
      };
      const auto put = [&](int i, __m128i x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(v + (g + i) * kTile + r), x);
      };
      const __m128i low01 = _mm_unpacklo_epi32(row(0), row(1)), high01 = _mm_unpackhi_epi32(row(0), row(1));
      const __m128i low23 = _mm_unpacklo_epi32(row(2), row(3)), high23 = _mm_unpackhi_epi32(row(2), row(3));
      put(0, _mm_unpacklo_epi64(low01, low23));
      put(1, _mm_unpackhi_epi64(low01, low23));
      put(2, _mm_unpacklo_epi64(high01, high23));
      put(3, _mm_unpackhi_epi64(high01, high23));
    }
#else
  for (int r = 0; r < kTile; ++r)
    for (int g = 0; g < n; ++g) v[g * kTile + r] = load_as<uint32_t>(u + r * stride + 4 * g);
#endif
}
void put_nibbles(const uint32_t (*v)[kTile], uint8_t* to) {
  alignas(64) uint32_t w[4][kTile];
  for (int g = 0; g < 4; ++g)
    for (int r = 0; r < kTile; ++r) w[g][r] = (v[g][r] & 0x0f0f0f0fu) | (v[g + 4][r] & 0x0f0f0f0fu) << 4;
  std::memcpy(to, w, sizeof w);
}
void put_pairs(const uint32_t (*v)[kTile], int shift, uint8_t* to) {
  alignas(64) uint32_t w[2][kTile];
  for (int i = 0; i < 2; ++i)
    for (int r = 0; r < kTile; ++r) {
      uint32_t word = 0;
      for (int g = 0; g < 4; ++g) word |= (v[4 * i + g][r] >> shift & 0x03030303u) << 2 * g;
      w[i][r] = word;
    }
  std::memcpy(to, w, sizeof w);
}
void put_bits(const uint32_t (*v)[kTile], int shift, uint8_t* to) {
  for (int g = 0; g < 8; ++g)
#if defined(__SSE2__)
    for (int r = 0; r < kTile; r += 4) {  // the top bits of sixteen bytes at once
      const __m128i x = _mm_slli_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(v[g] + r)), 7 - shift);
      const uint16_t mask = static_cast<uint16_t>(_mm_movemask_epi8(x));
      std::memcpy(to + 8 * g + r / 2, &mask, 2);
    }
#else
    for (int r = 0; r < kTile; r += 2) {
      // Bits 0, 8, 16, 24 of a word gather in bits 24..27 of the product (the smaller products never carry).
      const uint32_t low = (v[g][r] >> shift & 0x01010101u) * 0x01020408u >> 24 & 15;
      const uint32_t high = (v[g][r + 1] >> shift & 0x01010101u) * 0x01020408u >> 24 & 15;
      to[8 * g + r / 2] = static_cast<uint8_t>(low | high << 4);
    }
#endif
}

template <Kind K>
void put_block(const uint8_t* u, int64_t stride, uint8_t* to) {
  alignas(64) uint32_t v[8][kTile];
  transpose(u, stride, 8, v[0]);
  if constexpr (K == Kind::q8_0 || (is_grouped(K) && !is_grouped4(K))) {
    std::memcpy(to, v, sizeof v);
  } else if constexpr (K == Kind::q2_k || K == Kind::q3_k) {
    put_pairs(v, 0, to);
    if constexpr (K == Kind::q3_k) put_bits(v, 2, to + 128);
  } else {
    put_nibbles(v, to);
    if constexpr (K == Kind::q5_0 || K == Kind::q5_1 || K == Kind::q5_k) put_bits(v, 4, to + 256);
    if constexpr (K == Kind::q6_k) put_pairs(v, 4, to + 256);
  }
}

template <Kind K>
void pack_quantised(const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t tile, uint8_t* quants,
                    uint8_t* scales) {
  constexpr Source S = source(K);
  constexpr Layout L = layout(K);
  constexpr int kBlocks = S.cols / kBlock;
  static_assert(kBlocks == L.super);
  const int present = static_cast<int>(std::min<int64_t>(kTile, n_rows - tile * kTile));
  alignas(64) uint8_t u[kTile][S.cols];
  std::memset(u, 0, sizeof u);
  for (int64_t b = 0; b < cols / S.cols; ++b) {
    uint8_t* s = scales + b * L.scales;
    if (present < kTile) std::memset(s, 0, L.scales);
    for (int r = 0; r < present; ++r) {
      const uint8_t* p = rows + (tile * kTile + r) * row_bytes + b * S.bytes;
      decode<K>(p, u[r]);
      decode_scales<K>(p, r, s);
    }
    for (int i = 0; i < kBlocks; ++i) put_block<K>(u[0] + kBlock * i, S.cols, quants + (b * kBlocks + i) * L.quants);
  }
}

template <Kind K>
void pack_float(const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t tile, uint8_t* quants) {
  constexpr int kBytes = source(K).bytes, kWords = kBlock * kBytes / 4;
  const int present = static_cast<int>(std::min<int64_t>(kTile, n_rows - tile * kTile));
  alignas(64) uint8_t staged[kTile][kBlock * kBytes];
  alignas(64) uint32_t v[kWords][kTile];
  for (int64_t k = 0; k < cols; k += kBlock) {
    const uint8_t* p = rows + tile * kTile * row_bytes + k * kBytes;
    uint8_t* to = quants + k * kTile * kBytes;
    const int64_t width = std::min<int64_t>(kBlock, cols - k);
    if (width < kBlock || present < kTile) {
      std::memset(staged, 0, sizeof staged);
      for (int r = 0; r < present; ++r) std::memcpy(staged[r], p + r * row_bytes, static_cast<size_t>(width * kBytes));
      transpose(staged[0], sizeof staged[0], kWords, v[0]);
    } else {
      transpose(p, row_bytes, kWords, v[0]);
    }
    if constexpr (K == Kind::f16) {  // words hold two columns: the kernels want them apart
      alignas(64) uint16_t half[kBlock * kTile];
      for (int i = 0; i < kWords; ++i)
        for (int r = 0; r < kTile; ++r) {
          half[2 * i * kTile + r] = static_cast<uint16_t>(v[i][r]);
          half[(2 * i + 1) * kTile + r] = static_cast<uint16_t>(v[i][r] >> 16);
        }
      std::memcpy(to, half, sizeof half);
    } else {
      std::memcpy(to, v, sizeof v);
    }
  }
}

template <Kind K>
float load_float(const uint8_t* p) {
  if constexpr (K == Kind::f32) return load_as<float>(p);
  if constexpr (K == Kind::f16) return half_at(p);
  return bf16_to_float(load_as<uint16_t>(p));
}

uint16_t quantise8(const float* x, uint8_t* u) {
  int32_t top = 0;  // magnitudes order like integers: a loop of integers is vectorised, NaN comes out on top
  for (int i = 0; i < kBlock; ++i) top = std::max(top, static_cast<int32_t>(std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu));
  const uint16_t half = float_to_half(std::bit_cast<float>(top) / 127.0f);
  const float scale = half_to_float(half);
  // The nearest multiple of the scale as stored, so that rounding the scale to fp16 costs no more than it must.
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  // Adding 1.5 * 2^23 rounds to the nearest even integer, which is then the low bits of the sum.
  for (int i = 0; i < kBlock; ++i) {
    const float scaled = std::min(std::max(x[i] * inverse, -127.0f), 127.0f) + 0x1.8p23f;
    u[i] = static_cast<uint8_t>((std::bit_cast<uint32_t>(scaled) & 255) ^ 128);
  }
  return half;
}

template <Kind K, Kind To>
void quantise_tile(const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t tile, uint8_t* quants,
                   uint8_t* scales) {
  const int present = static_cast<int>(std::min<int64_t>(kTile, n_rows - tile * kTile));
  alignas(64) uint8_t u[kTile][kBlock];
  for (int64_t b = 0; b * kBlock < cols; ++b) {
    std::memset(u, To == Kind::q8_0 ? 128 : 8, sizeof u);
    std::memset(scales + b * 32, 0, 32);
    const int width = static_cast<int>(std::min<int64_t>(kBlock, cols - b * kBlock));
    for (int r = 0; r < present; ++r) {
      float x[kBlock] = {};
      const uint8_t* p = rows + (tile * kTile + r) * row_bytes + b * kBlock * source(K).bytes;
      if (width == kBlock) {  // a constant trip count is vectorised
        for (int i = 0; i < kBlock; ++i) x[i] = load_float<K>(p + i * source(K).bytes);
      } else {
        for (int i = 0; i < width; ++i) x[i] = load_float<K>(p + i * source(K).bytes);
      }
      const uint16_t half = To == Kind::q8_0 ? quantise8(x, u[r]) : quantise4(x, u[r]);
      std::memcpy(scales + b * 32 + 2 * r, &half, 2);
    }
    put_block<To>(u[0], kBlock, quants + b * layout(To).quants);
  }
}

// Of one tile: see pack_codes.
template <Kind K>
void pack_codes_of(const Codes& from, int64_t tile, uint8_t* quants, uint8_t* scales) {
  constexpr Layout L = layout(K);
  constexpr int64_t kStep = kBlock * L.super;
  const int present = static_cast<int>(std::min<int64_t>(kTile, from.rows - tile * kTile));
  alignas(64) uint8_t u[kTile][kBlock];
  std::memset(u, 0, sizeof u);
  for (int64_t k = 0; k < from.cols; k += kBlock) {
    if (k % kStep == 0) {
      uint8_t* s = scales + k / kStep * L.scales;
      std::memset(s, 0, L.scales);
      for (int r = 0; r < present; ++r) {
        const int64_t at = (tile * kTile + r) * from.groups + k / from.group;
        if constexpr (is_grouped(K)) {
          std::memcpy(s + 4 * r, from.scales + at, 4);
          s[64 + r] = static_cast<uint8_t>(from.zeros[at]);
        } else {
          const float scale = from.scales[at];
          const uint16_t half = float_to_half(scale);
          std::memcpy(s + 2 * r, &half, 2);
        }
      }
    }
    const size_t width = static_cast<size_t>(std::min<int64_t>(kBlock, from.cols - k));
    for (int r = 0; r < present; ++r) std::memcpy(u[r], from.codes + (tile * kTile + r) * from.cols + k, width);
    put_block<K>(u[0], kBlock, quants + k / kBlock * L.quants);
  }
}

}  // namespace

void pack_codes(Kind kind, const Codes& from, int64_t first_tile, int64_t last_tile, uint8_t* quants, uint8_t* scales) {
  for_kind(kind, [&]<Kind K>() {
    if constexpr (takes_codes(K)) {
      for (int64_t t = first_tile; t < last_tile; ++t)
        pack_codes_of<K>(from, t, quants + t * tile_quants(K, from.cols), scales + t * tile_scales(K, from.cols));
    } else {
      __builtin_trap();
    }
  });
}

void pack_tiles(Kind kind, const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols, int64_t first_tile,
                int64_t last_tile, uint8_t* quants, uint8_t* scales) {
  for_kind(kind, [&]<Kind K>() {
    const int64_t tq = tile_quants(K, cols), ts = tile_scales(K, cols);
    for (int64_t t = first_tile; t < last_tile; ++t) {
      if constexpr (is_float(K))
        pack_float<K>(rows, row_bytes, n_rows, cols, t, quants + t * tq);
      else if constexpr (is_grouped(K))
        __builtin_trap();
      else
        pack_quantised<K>(rows, row_bytes, n_rows, cols, t, quants + t * tq, scales + t * ts);
    }
  });
}

void quantise_tiles(Kind from, Kind to, const uint8_t* rows, int64_t row_bytes, int64_t n_rows, int64_t cols,
                    int64_t first_tile, int64_t last_tile, uint8_t* quants, uint8_t* scales) {
  for_kind(from, [&]<Kind K>() {
    if constexpr (is_float(K)) {
      const int64_t tq = tile_quants(to, cols), ts = tile_scales(to, cols);
      for (int64_t t = first_tile; t < last_tile; ++t) {
        if (to == Kind::q4_0)
          quantise_tile<K, Kind::q4_0>(rows, row_bytes, n_rows, cols, t, quants + t * tq, scales + t * ts);
        else
          quantise_tile<K, Kind::q8_0>(rows, row_bytes, n_rows, cols, t, quants + t * tq, scales + t * ts);
      }
    } else {
      __builtin_trap();
    }
  });
}

void unpack_row(const Weights& w, int64_t row, float* out) {
  const int r = static_cast<int>(row % kTile);
  for_kind(w.kind, [&]<Kind K>() {
    const uint8_t* p = w.quants + row / kTile * tile_quants(K, w.cols);
    if constexpr (is_float(K)) {
      for (int64_t k = 0; k < w.cols; ++k) out[k] = float_at<K>(p, k, r);
    } else {
      constexpr Layout L = layout(K);
      const uint8_t* s = w.scales + row / kTile * tile_scales(K, w.cols);
      for (int64_t b = 0; b < w.blocks(); ++b) {
        int8_t code[kBlock];
        block_codes<K>(p + b * L.quants, r, code);
        const int inner = static_cast<int>(b % L.super);
        const uint8_t* super = s + b / L.super * L.scales;
        const int width = static_cast<int>(std::min<int64_t>(kBlock, w.cols - b * kBlock));
        for (int h = 0; h < 2; ++h) {
          const float scale = block_scale<K>(super, inner, h, r), minimum = block_minimum<K>(super, inner, h, r);
          for (int i = 16 * h; i < std::min(16 * h + 16, width); ++i) {
            const float product = scale * static_cast<float>(code[i] - block_zero<K>(super, r));
            out[b * kBlock + i] = has_minimum(K) && !is_grouped(K) ? product - minimum : product;
          }
        }
      }
    }
  });
}

void split_tile(const uint8_t* quants, int64_t bytes, uint8_t* high, uint8_t* low) {
  for (int64_t b = 0; b < bytes; b += 2 * kPlane, quants += 2 * kPlane, high += kPlane, low += kPlane)
    for (int i = 0; i < kPlane; ++i) {       // groups 0 to 3 of a block, then 4 to 7
      const uint8_t x = quants[i], y = quants[i + kPlane];
      const int group = i / 64, row = i % 64 / 4;
      high[i] = static_cast<uint8_t>((x >> 4) | (y & 0xf0));
      low[64 * (row % 4) + 16 * (row / 4) + 4 * group + i % 4] = static_cast<uint8_t>((x & 15) | (y << 4));
    }
}

}  // namespace ridgeline
