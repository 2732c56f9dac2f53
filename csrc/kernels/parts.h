// Kernels of one instruction set that live in another file than its table.
#pragma once
#include "../api.h"

namespace ridgeline {

namespace avx512 {
void gemm_float(const Weights& w, const float* x, int64_t rows, int64_t stride, int64_t first, int64_t last, float* out,
                int64_t ld);
void gemm_bf16(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
               float* out, int64_t ld);
void gemm_bf16_widened(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
                       float* out, int64_t ld);
void head_bounds(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
                 int64_t score_ld, float* upper, int64_t ld, bool* broken);
int64_t head_doubtful(const float* upper, int64_t ld, int64_t rows, const float* bar, int64_t first, int64_t last,
                      int32_t* quads);
int64_t head_refine(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, int32_t* quads,
                    int64_t count, float* upper, int64_t ld, const float* bar);
void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants);
bool row_max(const float* x, int64_t n, int64_t offset, float* best, int64_t* at);
int64_t collect(const float* x, int64_t n, int64_t offset, float least, float* scores, int32_t* ids, bool* broken);
}  // namespace avx512

namespace scalar {
void head_bounds(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
                 int64_t score_ld, float* upper, int64_t ld, bool* broken);
int64_t head_doubtful(const float* upper, int64_t ld, int64_t rows, const float* bar, int64_t first, int64_t last,
                      int32_t* quads);
int64_t head_refine(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, int32_t* quads,
                    int64_t count, float* upper, int64_t ld, const float* bar);
void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants);
bool row_max(const float* x, int64_t n, int64_t offset, float* best, int64_t* at);
int64_t collect(const float* x, int64_t n, int64_t offset, float least, float* scores, int32_t* ids, bool* broken);
}  // namespace scalar

}  // namespace ridgeline
