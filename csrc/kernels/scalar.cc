// The scalar twins: the definition that every other instruction set is tested against.
#include <algorithm>
#include <vector>

#include <cmath>
#include <limits>

#include "../packed.h"
#include "parts.h"

namespace ridgeline {
namespace {

void quantise(const float* x, int64_t cols, int8_t* q, float* scale, int32_t* sum) {
  for (int64_t b = 0; b * kBlock < cols; ++b) {
    const int width = static_cast<int>(cols - b * kBlock < kBlock ? cols - b * kBlock : kBlock);
    float top = 0;
    bool finite = true;
    for (int i = 0; i < width; ++i) {
      const float magnitude = std::fabs(x[b * kBlock + i]);
      finite = finite && magnitude <= std::numeric_limits<float>::max();
      top = magnitude > top ? magnitude : top;
    }
    // Non-finite blocks must show: scale NaN. Below 2^-100 the inverse would overflow: zero.
    const bool large = finite && top >= 0x1p-100f;
    const float inverse = large ? 127.0f / top : 0.0f;
    scale[b] = large ? top / 127.0f : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    for (int h = 0; h < 2; ++h) {
      int32_t total = 0;
      for (int i = 16 * h; i < 16 * h + 16; ++i) {
        const int value = large && i < width ? static_cast<int>(std::nearbyint(x[b * kBlock + i] * inverse)) : 0;
        q[b * kBlock + i] = static_cast<int8_t>(value);
        total += value;
      }
      sum[2 * b + h] = total;
    }
  }
}

int lanes_of(const Weights& w, int64_t tile) {
  const int64_t left = w.rows - tile * kTile;
  return static_cast<int>(left < kTile ? left : kTile);
}

void gemm(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  if (w.kind == Kind::q8_split) {
    std::vector<uint8_t> tile(static_cast<size_t>(w.blocks() * 2 * kPlane));
    for (int64_t t = first; t < last; ++t) {
      scalar::head_tile({w.rows, w.cols, w.quants, w.low, w.scales}, t, tile.data());
      const Weights part{Kind::q8_0, std::min<int64_t>(kTile, w.rows - t * kTile), w.cols, tile.data(),
                         w.scales + t * w.blocks() * layout(Kind::q8_0).scales};
      gemm(part, x, 0, 1, out + t * kTile, ld);
    }
    return;
  }
  for_kind(w.kind, [&]<Kind K>() {
    if constexpr (is_float(K)) {
      __builtin_trap();
    } else {
      constexpr Layout L = layout(K);
      constexpr int kParts = has_halves(K) ? 2 : 1, kWidth = kBlock / kParts;
      for (int64_t t = first; t < last; ++t)
        for (int r = 0; r < lanes_of(w, t); ++r) {
          float* o = out + t * kTile + r;
          for (int64_t m = 0; m < x.rows; ++m) o[m * ld] = 0;
          for (int64_t b = 0; b < w.blocks(); ++b) {
            const uint8_t* s = w.scales + (t * w.supers() + b / L.super) * L.scales;
            const int inner = static_cast<int>(b % L.super);
            int8_t code[kBlock];
            block_codes<K>(w.quants + (t * w.blocks() + b) * L.quants, r, code);
            for (int h = 0; h < kParts; ++h) {
              const float scale = block_scale<K>(s, inner, h, r), minimum = block_minimum<K>(s, inner, h, r);
              for (int64_t m = 0; m < x.rows; ++m) {
                const int8_t* q = x.q + m * x.stride + b * kBlock;
                const int32_t* sum = x.sum + m * (x.stride / 16) + 2 * b;
                int32_t dot = 0;
                for (int i = h * kWidth; i < (h + 1) * kWidth; ++i) dot += code[i] * q[i];
                const float a = x.scale[m * (x.stride / kBlock) + b];
                o[m * ld] += static_cast<float>(dot) * (scale * a);
                if (has_minimum(K))
                  o[m * ld] -= minimum * (a * static_cast<float>(kParts == 2 ? sum[h] : sum[0] + sum[1]));
              }
            }
          }
        }
    }
  });
}

void gemm_float(const Weights& w, const float* x, int64_t rows, int64_t stride, int64_t first, int64_t last, float* out,
                int64_t ld) {
  for_kind(w.kind, [&]<Kind K>() {
    constexpr Layout L = layout(K);
    for (int64_t t = first; t < last; ++t)
      for (int r = 0; r < lanes_of(w, t); ++r) {
        float* o = out + t * kTile + r;
        for (int64_t m = 0; m < rows; ++m) o[m * ld] = 0;
        for (int64_t b = 0; b < w.blocks(); ++b) {
          float weight[kBlock];
          if constexpr (is_float(K)) {
            const uint8_t* tile = w.quants + t * w.blocks() * L.quants;
            for (int i = 0; i < kBlock; ++i) weight[i] = float_at<K>(tile, b * kBlock + i, r);
          } else {
            const uint8_t* s = w.scales + (t * w.supers() + b / L.super) * L.scales;
            const int inner = static_cast<int>(b % L.super);
            int8_t code[kBlock];
            block_codes<K>(w.quants + (t * w.blocks() + b) * L.quants, r, code);
            for (int i = 0; i < kBlock; ++i) {
              weight[i] = block_scale<K>(s, inner, i / 16, r) * static_cast<float>(code[i] - block_zero<K>(s, r));
              if (has_minimum(K) && !is_grouped(K)) weight[i] -= block_minimum<K>(s, inner, i / 16, r);
            }
          }
          for (int64_t m = 0; m < rows; ++m)
            for (int i = 0; i < kBlock && b * kBlock + i < w.cols; ++i)
              o[m * ld] += weight[i] * x[m * stride + b * kBlock + i];
        }
      }
  });
}

void gemm_bf16(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
               float* out, int64_t ld) {
  if (w.kind != Kind::bf16) __builtin_trap();
  for (int64_t t = first; t < last; ++t)
    for (int r = 0; r < lanes_of(w, t); ++r)
      for (int64_t m = 0; m < rows; ++m) {
        const uint8_t* tile = w.quants + t * w.blocks() * layout(Kind::bf16).quants;
        float total = 0;
        for (int64_t k = 0; k < w.cols; ++k)
          total += float_at<Kind::bf16>(tile, k, r) * bf16_to_float(x[m * stride + k]);
        out[m * ld + t * kTile + r] = total;
      }
}

}  // namespace

const Kernels* scalar_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "scalar";
    k.quantise = quantise;
    k.gemm = gemm;
    k.gemm_float = gemm_float;
    k.gemm_bf16 = gemm_bf16;
    k.head_bounds = scalar::head_bounds;
    k.head_doubtful = scalar::head_doubtful;
    k.head_refine = scalar::head_refine;
    k.head_tile = scalar::head_tile;
    k.row_max = scalar::row_max;
    k.collect = scalar::collect;
    return k;
  }();
  return &table;
}

}  // namespace ridgeline
