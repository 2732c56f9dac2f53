// Reading the packed layout one row of a tile at a time: what the scalar kernels and unpack_row share.
//
// Columns of a block are numbered c = 4 g + j: group g (0..7), place j (0..3). A group takes 64 bytes, 4 a row, so row
// r of a tile has its four columns at 64 g + 4 r. Four-bit parts hold group g in the low half of vector g & 3 for g < 4
// and in the high half for g >= 4; two-bit parts hold group g in bits 2 (g & 3) of vector g / 4; one-bit parts are a
// 64-bit mask a group. A weight is scale * code - minimum, code being signed; of grouped kinds it is scale * (code - zero).
#pragma once
#include <bit>
#include <cstring>

#include "api.h"

namespace ridgeline {

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <typename T>
inline T load_as(const void* p) {  // any alignment
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h & 0x7c00, fraction = h & 0x3ff;
  const float small = static_cast<float>(static_cast<int32_t>(fraction)) * 0x1p-24f;  // zero and subnormals: exact
  // The exponent's bias grows by 112; infinity and NaN need it twice. Selections, so that loops are vectorised.
  const uint32_t large = (static_cast<uint32_t>(h & 0x7fff) << 13) + (exponent == 0x7c00 ? 224u << 23 : 112u << 23);
  return std::bit_cast<float>((exponent ? large : std::bit_cast<uint32_t>(small)) | sign);
}
inline uint16_t float_to_half(float x) {  // round to nearest even; NaN stays visible
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffffu, sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const float magnitude = std::bit_cast<float>(bits);
  if (bits > 0x7f800000u) return 0x7e00;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f)  // adds at 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000u));
  const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}
inline float half_at(const uint8_t* p) { return half_to_float(load_as<uint16_t>(p)); }
inline float bf16_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

constexpr bool is_float(Kind kind) { return kind == Kind::f16 || kind == Kind::bf16 || kind == Kind::f32; }
// Scales for 16 columns each rather than 32.
constexpr bool has_halves(Kind kind) { return kind == Kind::q2_k || kind == Kind::q3_k || kind == Kind::q6_k; }
constexpr bool has_minimum(Kind kind) {
  return is_grouped(kind) || kind == Kind::q4_1 || kind == Kind::q5_1 || kind == Kind::q2_k || kind == Kind::q4_k || kind == Kind::q5_k;
}

// The 32 codes of row r of a tile, from the block's quants.
template <Kind K>
inline void block_codes(const uint8_t* p, int r, int8_t* code) {
  const auto nibble = [&](int g, int j) { return p[64 * (g & 3) + 4 * r + j] >> (g < 4 ? 0 : 4) & 15; };
  const auto pair = [&](int at, int g, int j) { return p[at + 64 * (g >> 2) + 4 * r + j] >> 2 * (g & 3) & 3; };
  const auto bit = [&](int at, int g, int j) { return p[at + 8 * g + r / 2] >> (4 * (r & 1) + j) & 1; };
  for (int g = 0; g < 8; ++g)
    for (int j = 0; j < 4; ++j) {
      int c = 0;
      if constexpr (K == Kind::q8_0 || (is_grouped(K) && !is_grouped4(K))) c = p[64 * g + 4 * r + j] - 128;
      if constexpr (K == Kind::q4_0 || is_grouped4(K)) c = nibble(g, j) - 8;
      if constexpr (K == Kind::q4_1 || K == Kind::q4_k) c = nibble(g, j);
      if constexpr (K == Kind::q5_0) c = nibble(g, j) + 16 * bit(256, g, j) - 16;
      if constexpr (K == Kind::q5_1 || K == Kind::q5_k) c = nibble(g, j) + 16 * bit(256, g, j);
      if constexpr (K == Kind::q6_k) c = nibble(g, j) + 16 * pair(256, g, j) - 32;
      if constexpr (K == Kind::q3_k) c = pair(0, g, j) + 4 * bit(128, g, j) - 4;
      if constexpr (K == Kind::q2_k) c = pair(0, g, j);
      if constexpr (K == Kind::iq4_nl || K == Kind::iq4_xs) c = kIq4Values[nibble(g, j)];
      code[4 * g + j] = static_cast<int8_t>(c);
    }
}

// What a grouped kind subtracts from a code before it is scaled, so that fp32 products are those of scale * (code - zero).
template <Kind K>
inline int block_zero(const uint8_t* s, int r) {
  return is_grouped(K) ? static_cast<int8_t>(s[64 + r]) : 0;
}

// Scale and minimum of row r for half h (columns 16 h ..) of block `inner` of the superblock at s.
template <Kind K>
inline float block_scale(const uint8_t* s, int inner, int h, int r) {
  if constexpr (is_grouped(K)) return load_as<float>(s + 4 * r);
  const float d = half_at(s + 2 * r);
  if constexpr (K == Kind::q4_k || K == Kind::q5_k) return d * static_cast<float>(s[64 + 32 * inner + r]);
  if constexpr (K == Kind::q2_k) return d * static_cast<float>(s[64 + 32 * inner + 16 * h + r] & 15);
  if constexpr (K == Kind::q3_k || K == Kind::q6_k)
    return d * static_cast<float>(static_cast<int8_t>(s[32 + 32 * inner + 16 * h + r]));
  if constexpr (K == Kind::iq4_xs) return d * static_cast<float>(static_cast<int8_t>(s[32 + 16 * inner + r]));
  return d;
}
template <Kind K>
inline float block_minimum(const uint8_t* s, int inner, int h, int r) {
  if constexpr (!has_minimum(K)) return 0.0f;
  if constexpr (is_grouped(K)) return load_as<float>(s + 4 * r) * static_cast<float>(block_zero<K>(s, r));
  const float m = half_at(s + 32 + 2 * r);
  if constexpr (K == Kind::q4_1 || K == Kind::q5_1) return -m;
  if constexpr (K == Kind::q2_k) return m * static_cast<float>(s[64 + 32 * inner + 16 * h + r] >> 4);
  return m * static_cast<float>(s[64 + 32 * inner + 16 + r]);
}

// Where float kinds keep column k of row r of a tile: [k][16], and for bf16 [k / 2][16][2].
template <Kind K>
inline float float_at(const uint8_t* tile, int64_t k, int r) {
  if constexpr (K == Kind::f32) return load_as<float>(tile + (k * kTile + r) * 4);
  if constexpr (K == Kind::f16) return half_at(tile + (k * kTile + r) * 2);
  return bf16_to_float(load_as<uint16_t>(tile + ((k / 2 * kTile + r) * 2 + k % 2) * 2));
}

// Calls f.template operator()<K>() for the kind given at run time.
template <typename F>
inline auto for_kind(Kind kind, F&& f) {
  switch (kind) {
    case Kind::q4_0: return f.template operator()<Kind::q4_0>();
    case Kind::q4_1: return f.template operator()<Kind::q4_1>();
    case Kind::q5_0: return f.template operator()<Kind::q5_0>();
    case Kind::q5_1: return f.template operator()<Kind::q5_1>();
    case Kind::q8_0: return f.template operator()<Kind::q8_0>();
    case Kind::q2_k: return f.template operator()<Kind::q2_k>();
    case Kind::q3_k: return f.template operator()<Kind::q3_k>();
    case Kind::q4_k: return f.template operator()<Kind::q4_k>();
    case Kind::q5_k: return f.template operator()<Kind::q5_k>();
    case Kind::q6_k: return f.template operator()<Kind::q6_k>();
    case Kind::iq4_nl: return f.template operator()<Kind::iq4_nl>();
    case Kind::iq4_xs: return f.template operator()<Kind::iq4_xs>();
    case Kind::f16: return f.template operator()<Kind::f16>();
    case Kind::bf16: return f.template operator()<Kind::bf16>();
    case Kind::f32: return f.template operator()<Kind::f32>();
    case Kind::i4_32: return f.template operator()<Kind::i4_32>();
    case Kind::i4_64: return f.template operator()<Kind::i4_64>();
    case Kind::i4_128: return f.template operator()<Kind::i4_128>();
    case Kind::i8_32: return f.template operator()<Kind::i8_32>();
    case Kind::i8_128: return f.template operator()<Kind::i8_128>();
    default: __builtin_trap();
  }
}

}  // namespace ridgeline
