// Packing and matrix products: every kind, odd shapes, every instruction set of the machine. Exits non-zero on failure.
//
// Link with pack.cc and kernels/{scalar,avx2,avx512,avx512_float}.cc, each with the flags of its instruction set, and
// -O1 -ffp-contract=off -fsanitize=address,undefined --param asan-instrumentation-with-call-threshold=0: with checks
// inline the AVX-512 files take many minutes to compile, with calls 20 s.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../pack.h"
#include "../packed.h"

using namespace ridgeline;

namespace {

int failures = 0;
#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition) && ++failures <= 20) {                       \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (0)

const char* kNames[] = {"q4_0", "q4_1", "q5_0",   "q5_1",   "q8_0", "q2_k", "q3_k", "q4_k",
                        "q5_k", "q6_k", "iq4_nl", "iq4_xs", "f16",  "bf16", "f32",  "",
                        "", "i4_32", "i4_64", "i4_128", "i8_32", "i8_128"};
std::mt19937 rng(7);
float uniform() { return std::uniform_real_distribution<float>(-1, 1)(rng); }
int random_byte() { return static_cast<int>(rng() & 255); }

// An array of exactly n elements, 64-byte aligned: AddressSanitizer sees the first byte behind it.
template <typename T>
struct Array {
  T* data;
  size_t n;
  explicit Array(size_t count) : n(count) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, std::max<size_t>(n * sizeof(T), 1))) std::abort();
    data = static_cast<T*>(p);
    std::memset(p, 0, n * sizeof(T));
  }
  Array(const Array&) = delete;
  ~Array() { std::free(data); }
  T& operator[](size_t i) { return data[i]; }
};

// Where a block has its fp16 fields; random bytes there could be infinite.
std::vector<int> half_fields(Kind kind) {
  switch (kind) {
    case Kind::q4_1:
    case Kind::q5_1:
    case Kind::q4_k:
    case Kind::q5_k: return {0, 2};
    case Kind::q2_k: return {80, 82};
    case Kind::q3_k: return {108};
    case Kind::q6_k: return {208};
    case Kind::f32:
    case Kind::f16:
    case Kind::bf16: return {};
    default: return {0};
  }
}

void random_block(Kind kind, uint8_t* p) {
  for (int i = 0; i < source(kind).bytes; ++i) p[i] = static_cast<uint8_t>(random_byte());
  // 2^-14 .. 2^-8, either sign, and sometimes subnormal or zero.
  const auto half = [] {
    const uint32_t magnitude = rng() % 16 == 0 ? rng() % 3 : 0x0400 + rng() % 0x1800;
    return static_cast<uint16_t>(magnitude | (rng() & 1) << 15);
  };
  for (int at : half_fields(kind)) {
    const uint16_t h = half();
    std::memcpy(p + at, &h, 2);
  }
  const float f = uniform();
  if (kind == Kind::f32) std::memcpy(p, &f, 4);
  if (kind == Kind::bf16) std::memcpy(p, reinterpret_cast<const uint8_t*>(&f) + 2, 2);
  if (kind == Kind::f16) {
    const uint16_t h = half();
    std::memcpy(p, &h, 2);
  }
}

// Column c of a GGUF block, straight from the description of the format: independent of the packed layout.
float source_value(Kind kind, const uint8_t* p, int c) {
  const auto nibble = [&](const uint8_t* qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; };  // 32 columns
  const auto fp16 = [&](int at) { return half_to_float(load_as<uint16_t>(p + at)); };
  const int b = c / 32, i = c % 32, quarter = c % 128 / 32, half = c / 128;
  switch (kind) {
    case Kind::f32: return load_as<float>(p);
    case Kind::f16: return fp16(0);
    case Kind::bf16: return bf16_to_float(load_as<uint16_t>(p));
    case Kind::q8_0: return fp16(0) * static_cast<float>(static_cast<int8_t>(p[2 + c]));
    case Kind::q4_0: return fp16(0) * static_cast<float>(nibble(p + 2, c) - 8);
    case Kind::q4_1: return fp16(0) * static_cast<float>(nibble(p + 4, c)) + fp16(2);
    case Kind::q5_0:
      return fp16(0) * static_cast<float>(nibble(p + 6, c) + 16 * (load_as<uint32_t>(p + 2) >> c & 1) - 16.0f);
    case Kind::q5_1:
      return fp16(0) * static_cast<float>(nibble(p + 8, c) + 16 * (load_as<uint32_t>(p + 4) >> c & 1)) + fp16(2);
    case Kind::iq4_nl: return fp16(0) * kIq4Values[nibble(p + 2, c)];
    case Kind::iq4_xs: {
      const int scale = (p[4 + b / 2] >> 4 * (b % 2) & 15) | (load_as<uint16_t>(p + 2) >> 2 * b & 3) << 4;
      return fp16(0) * static_cast<float>(scale - 32) * kIq4Values[nibble(p + 8 + 16 * b, i)];
    }
    case Kind::q2_k: {
      const int field = p[c / 16], q = p[16 + 32 * half + i] >> 2 * quarter & 3;
      return fp16(80) * static_cast<float>(field & 15) * static_cast<float>(q) -
             fp16(82) * static_cast<float>(field >> 4);
    }
    case Kind::q3_k: {
      const int j = c / 16, scale = (j < 8 ? p[96 + j] & 15 : p[88 + j] >> 4) | (p[104 + j % 4] >> 2 * (j / 4) & 3)
                                                                                    << 4;
      const int q = (p[32 + 32 * half + i] >> 2 * quarter & 3) - (p[i] >> b & 1 ? 0 : 4);
      return fp16(108) * static_cast<float>(scale - 32) * static_cast<float>(q);
    }
    case Kind::q4_k:
    case Kind::q5_k: {
      const uint8_t* s = p + 4;
      const int scale = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
      const int minimum = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | (s[b] >> 6) << 4;
      int q = p[(kind == Kind::q4_k ? 16 : 48) + 32 * (b / 2) + i] >> 4 * (b % 2) & 15;
      if (kind == Kind::q5_k) q += 16 * (p[16 + i] >> b & 1);
      return fp16(0) * static_cast<float>(scale) * static_cast<float>(q) - fp16(2) * static_cast<float>(minimum);
    }
    case Kind::q6_k: {
      const int low = p[64 * half + 32 * (quarter % 2) + i] >> 4 * (quarter / 2) & 15;
      const int q = (low | (p[128 + 32 * half + i] >> 2 * quarter & 3) << 4) - 32;
      return fp16(208) * static_cast<float>(static_cast<int8_t>(p[192 + c / 16])) * static_cast<float>(q);
    }
    default: std::abort();
  }
}

struct Packed {
  Array<uint8_t> quants, scales;
  Weights w;
  Packed(Kind kind, int64_t rows, int64_t cols)
      : quants(static_cast<size_t>((rows + kTile - 1) / kTile * tile_quants(kind, cols))),
        scales(static_cast<size_t>((rows + kTile - 1) / kTile * tile_scales(kind, cols))),
        w{kind, rows, cols, quants.data, scales.data} {
    std::memset(quants.data, 0xa5, quants.n);  // packing must write everything
    std::memset(scales.data, 0xa5, scales.n);
  }
};

struct Activations {
  int64_t rows, cols, stride;
  Array<float> x;  // stride cols + 3, NaN behind the columns
  Array<uint16_t> bf16;
  Array<int8_t> q;
  Array<float> scale;
  Array<int32_t> sum;
  Activations(int64_t m, int64_t k)
      : rows(m),
        cols(k),
        stride((k + 31) / 32 * 32),
        x(static_cast<size_t>(m * (k + 3))),
        bf16(static_cast<size_t>(m * (k + 3))),
        q(static_cast<size_t>(m * stride)),
        scale(static_cast<size_t>(m * stride / 32)),
        sum(static_cast<size_t>(m * stride / 16)) {
    for (int64_t i = 0; i < m * (k + 3); ++i) {
      bf16[static_cast<size_t>(i)] = static_cast<uint16_t>(std::bit_cast<uint32_t>(uniform()) >> 16);
      x[static_cast<size_t>(i)] = uniform();
      if (i % (k + 3) >= k) x[static_cast<size_t>(i)] = NAN, bf16[static_cast<size_t>(i)] = 0x7fc0;
    }
  }
  void quantise(const Kernels* kernels) {
    for (int64_t r = 0; r < rows; ++r)
      kernels->quantise(x.data + r * (cols + 3), cols, q.data + r * stride, scale.data + r * stride / 32,
                        sum.data + r * stride / 16);
  }
};

enum class Mode { integer, fp32, bf16 };

// out (m rows, n + 5 apart) between guard bands that must not change.
std::vector<float> run(const Kernels* k, Mode mode, const Weights& w, const Activations& a, int64_t row, int64_t m,
                       int64_t first, int64_t last) {
  constexpr float kGuard = 12345.0f;
  const int64_t ld = w.rows + 5;
  std::vector<float> out(static_cast<size_t>((m + 2) * ld), kGuard);
  float* o = out.data() + ld;
  const int64_t xs = a.cols + 3;
  if (mode == Mode::integer)
    k->gemm(
        w,
        {a.q.data + row * a.stride, a.scale.data + row * a.stride / 32, a.sum.data + row * a.stride / 16, m, a.stride},
        first, last, o, ld);
  if (mode == Mode::fp32) k->gemm_float(w, a.x.data + row * xs, m, xs, first, last, o, ld);
  if (mode == Mode::bf16) k->gemm_bf16(w, a.bf16.data + row * xs, m, xs, first, last, o, ld);
  std::vector<float> result;
  for (int64_t r = -1; r <= m; ++r)
    for (int64_t n = 0; n < ld; ++n) {
      const bool inside = r >= 0 && r < m && n >= first * kTile && n < std::min(last * kTile, w.rows);
      if (inside)
        result.push_back(o[r * ld + n]);
      else
        CHECK(o[r * ld + n] == kGuard, "%s %s writes outside: row %ld column %ld", k->name, kNames[int(w.kind)],
              long(r), long(n));
    }
  return result;
}

void test_products(const std::vector<const Kernels*>& sets, Mode mode, const Packed& packed,
                   const std::vector<float>& dense, Activations& a) {
  const Weights& w = packed.w;
  double top = 0;
  for (float value : dense) top = std::max(top, std::fabs(static_cast<double>(value)));
  // Minima of K-quants may be larger than their differences from the weights: 4 covers them.
  const auto bound = [&](int64_t r) {
    double total = 0;
    for (int64_t k = 0; k < w.cols; ++k) total += std::fabs(a.x[static_cast<size_t>(r * (w.cols + 3) + k)]) + 0.02;
    return 4 * top * total * 1e-5 + 1e-30;
  };
  const std::vector<float> twin = run(sets[0], mode, w, a, 0, a.rows, 0, w.tiles());
  for (int64_t r = 0; r < std::min<int64_t>(a.rows, 3); ++r)
    for (int64_t n = 0; n < w.rows; ++n) {
      double expected = 0;
      for (int64_t k = 0; k < w.cols; ++k) {
        const size_t at = static_cast<size_t>(r * (w.cols + 3) + k);
        const double x = mode == Mode::fp32 ? a.x[at]
                         : mode == Mode::bf16
                             ? bf16_to_float(a.bf16[at])
                             : static_cast<double>(a.scale[static_cast<size_t>((r * a.stride + k) / 32)]) *
                                   a.q[static_cast<size_t>(r * a.stride + k)];
        expected += x * dense[static_cast<size_t>(n * w.cols + k)];
      }
      const double got = twin[static_cast<size_t>(r * w.rows + n)];
      CHECK(std::fabs(got - expected) <= bound(r), "%s mode %d %ldx%ld: [%ld, %ld] %g, expected %g",
            kNames[int(w.kind)], int(mode), long(w.rows), long(w.cols), long(r), long(n), got, expected);
    }
  for (const Kernels* k : sets) {
    const std::vector<float> batch = run(k, mode, w, a, 0, a.rows, 0, w.tiles());
    for (int64_t r = 0; r < a.rows; ++r) {
      const double allowed = bound(r);
      for (int64_t n = 0; n < w.rows; ++n) {
        const size_t i = static_cast<size_t>(r * w.rows + n);
        CHECK(std::fabs(static_cast<double>(batch[i]) - twin[i]) <= allowed,
              "%s %s mode %d %ldx%ld: [%ld, %ld] %g, twin %g", k->name, kNames[int(w.kind)], int(mode), long(w.rows),
              long(w.cols), long(r), long(n), batch[i], twin[i]);
      }
    }
    // The first m rows, each row alone, and each tile alone must give the same bits as the batch.
    for (int64_t m = 1; m <= std::min<int64_t>(a.rows, 13); ++m) {
      const std::vector<float> part = run(k, mode, w, a, 0, m, 0, w.tiles());
      CHECK(!std::memcmp(part.data(), batch.data(), part.size() * 4), "%s %s mode %d: %ld rows", k->name,
            kNames[int(w.kind)], int(mode), long(m));
    }
    for (int64_t r = 0; r < a.rows; r += a.rows > 13 ? 7 : 1) {
      const std::vector<float> alone = run(k, mode, w, a, r, 1, 0, w.tiles());
      CHECK(!std::memcmp(alone.data(), batch.data() + r * w.rows, alone.size() * 4), "%s %s mode %d: row %ld alone",
            k->name, kNames[int(w.kind)], int(mode), long(r));
    }
    for (int64_t t = 0; t < w.tiles(); ++t) {
      const std::vector<float> tile = run(k, mode, w, a, 0, a.rows, t, t + 1);
      const int64_t width = std::min<int64_t>(kTile, w.rows - t * kTile);
      for (int64_t r = 0; r < a.rows; ++r)
        CHECK(!std::memcmp(tile.data() + r * width, batch.data() + r * w.rows + t * kTile,
                           static_cast<size_t>(width) * 4),
              "%s %s mode %d: tile %ld row %ld", k->name, kNames[int(w.kind)], int(mode), long(t), long(r));
    }
  }
}

void test_kind(const std::vector<const Kernels*>& sets, Kind kind, int64_t rows, int64_t cols, int64_t m) {
  const Source s = source(kind);
  const int64_t row_bytes = cols / s.cols * s.bytes + 3;  // any alignment
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * row_bytes + 1));
  std::vector<float> dense(static_cast<size_t>(rows * cols)), got(static_cast<size_t>(cols));
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t b = 0; b < cols / s.cols; ++b) {
      uint8_t* p = bytes.data() + 1 + n * row_bytes + b * s.bytes;
      random_block(kind, p);
      for (int c = 0; c < s.cols; ++c) dense[static_cast<size_t>(n * cols + b * s.cols + c)] = source_value(kind, p, c);
    }
  Packed packed(kind, rows, cols);
  const int64_t middle = packed.w.tiles() / 2;
  pack_tiles(kind, bytes.data() + 1, row_bytes, rows, cols, middle, packed.w.tiles(), packed.quants.data,
             packed.scales.data);
  pack_tiles(kind, bytes.data() + 1, row_bytes, rows, cols, 0, middle, packed.quants.data, packed.scales.data);
  for (int64_t n = 0; n < rows; ++n) {
    unpack_row(packed.w, n, got.data());
    for (int64_t k = 0; k < cols; ++k)
      CHECK(got[static_cast<size_t>(k)] == dense[static_cast<size_t>(n * cols + k)],
            "%s row %ld column %ld: %g, source %g", kNames[int(kind)], long(n), long(k), got[static_cast<size_t>(k)],
            dense[static_cast<size_t>(n * cols + k)]);
  }
  const Weights padded{kind, packed.w.tiles() * kTile, cols, packed.quants.data, packed.scales.data};
  for (int64_t n = rows; n < padded.rows; ++n) {
    unpack_row(padded, n, got.data());
    for (float value : got) CHECK(value == 0, "%s padding row %ld is not zero", kNames[int(kind)], long(n));
  }
  Activations a(m, cols);
  a.quantise(sets[0]);
  if (!is_float(kind)) test_products(sets, Mode::integer, packed, dense, a);
  test_products(sets, Mode::fp32, packed, dense, a);
  if (kind == Kind::bf16) test_products(sets, Mode::bf16, packed, dense, a);
}

// Codes with a scale and a zero for `group` columns: every kind that takes them.
void test_codes(const std::vector<const Kernels*>& sets, Kind kind, int64_t rows, int64_t cols, int64_t group) {
  const int64_t groups = (cols + group - 1) / group;
  const bool four = kind == Kind::q4_0 || is_grouped4(kind);
  Array<uint8_t> codes(static_cast<size_t>(rows * cols));
  Array<float> scales(static_cast<size_t>(rows * groups));
  Array<int8_t> zeros(static_cast<size_t>(rows * groups));
  for (size_t i = 0; i < codes.n; ++i) codes[i] = static_cast<uint8_t>(random_byte() & (four ? 15 : 255));
  for (size_t i = 0; i < scales.n; ++i) {
    scales[i] = uniform() / 64;
    if (is_grouped(kind)) zeros[i] = static_cast<int8_t>(four ? random_byte() % 17 - 8 : random_byte() - 128);
    else scales[i] = half_to_float(float_to_half(scales[i]));
  }
  std::vector<float> dense(static_cast<size_t>(rows * cols)), got(static_cast<size_t>(cols));
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t k = 0; k < cols; ++k) {
      const size_t at = static_cast<size_t>(n * groups + k / group), i = static_cast<size_t>(n * cols + k);
      dense[i] = scales[at] * static_cast<float>(codes[i] - (four ? 8 : 128) - zeros[at]);
    }
  Packed packed(kind, rows, cols);
  const Codes from{codes.data, scales.data, zeros.data, rows, cols, group, groups};
  pack_codes(kind, from, packed.w.tiles() / 2, packed.w.tiles(), packed.quants.data, packed.scales.data);
  pack_codes(kind, from, 0, packed.w.tiles() / 2, packed.quants.data, packed.scales.data);
  for (int64_t n = 0; n < rows; ++n) {
    unpack_row(packed.w, n, got.data());
    for (int64_t k = 0; k < cols; ++k)
      CHECK(got[static_cast<size_t>(k)] == dense[static_cast<size_t>(n * cols + k)], "%s codes [%ld, %ld]",
            kNames[int(kind)], long(n), long(k));
  }
  Activations a(13, cols);
  a.quantise(sets[0]);
  test_products(sets, Mode::integer, packed, dense, a);
  test_products(sets, Mode::fp32, packed, dense, a);
}

// Against the nearest multiples of the scale that just holds the largest magnitude.
void test_four_bits() {
  for (int64_t cols : {32, 640, 1023}) {
    const int64_t rows = 33;
    std::vector<float> x(static_cast<size_t>(rows * cols)), got(static_cast<size_t>(cols));
    for (float& value : x) value = uniform() * uniform();
    Packed packed(Kind::q4_0, rows, cols);
    quantise_tiles(Kind::f32, Kind::q4_0, reinterpret_cast<const uint8_t*>(x.data()), cols * 4, rows, cols, 0,
                   packed.w.tiles(), packed.quants.data, packed.scales.data);
    for (int64_t n = 0; n < rows; ++n) {
      unpack_row(packed.w, n, got.data());
      for (int64_t k = 0; k < cols; k += 32) {
        float top = 0;
        double error = 0, plain = 0;
        for (int64_t c = k; c < std::min(k + 32, cols); ++c) top = std::max(top, std::fabs(x[static_cast<size_t>(n * cols + c)]));
        for (int64_t c = k; c < std::min(k + 32, cols); ++c) {
          const float value = x[static_cast<size_t>(n * cols + c)], scale = top / 7.5f;
          const float q = std::min(7.0f, std::max(-8.0f, std::nearbyint(value / scale)));
          error += std::pow(got[static_cast<size_t>(c)] - value, 2), plain += std::pow(q * scale - value, 2);
        }
        CHECK(error <= plain * 1.01 + 1e-6, "four bits [%ld, %ld]: %g, nearest %g", long(n), long(k), error, plain);
      }
    }
  }
}

void test_quantise(const std::vector<const Kernels*>& sets) {
  for (int64_t cols : {1, 15, 16, 17, 31, 32, 33, 640, 1023}) {
    const int64_t blocks = (cols + 31) / 32;
    Array<float> x(static_cast<size_t>(cols));
    for (int kind = 0; kind < 5; ++kind) {
      for (size_t i = 0; i < x.n; ++i)
        x[i] = uniform() * std::exp2(static_cast<float>(static_cast<int>(rng() % 40) - 20));
      if (kind == 1) x[x.n / 2] = NAN;
      if (kind == 2) x[x.n / 2] = -INFINITY;
      if (kind == 3)
        for (size_t i = 0; i < x.n; ++i) x[i] = uniform() * 0x1p-120f;
      if (kind == 4)
        for (size_t i = 0; i < x.n; ++i) x[i] = 0;
      std::vector<int8_t> expected;
      for (const Kernels* k : sets) {
        Array<int8_t> q(static_cast<size_t>(blocks * 32));
        Array<float> scale(static_cast<size_t>(blocks));
        Array<int32_t> sum(static_cast<size_t>(blocks * 2));
        k->quantise(x.data, cols, q.data, scale.data, sum.data);
        for (int64_t i = 0; i < blocks * 32; ++i) {
          const float s = scale[static_cast<size_t>(i / 32)], value = i < cols ? x[static_cast<size_t>(i)] : 0.0f;
          const int8_t code = q[static_cast<size_t>(i)];
          CHECK(code != -128, "%s: -128 breaks the signed products", k->name);
          if (kind == 0)
            CHECK(std::fabs(value - s * code) <= s * 0.5001f, "%s cols %ld [%ld]", k->name, long(cols), long(i));
          if (kind > 2) CHECK(code == 0 && s == 0, "%s tiny block", k->name);
        }
        if (kind == 1 || kind == 2)
          CHECK(std::isnan(scale[x.n / 2 / 32]), "%s: a non-finite block must not look sound", k->name);
        for (int64_t h = 0; h < 2 * blocks; ++h) {
          int total = 0;
          for (int i = 0; i < 16; ++i) total += q[static_cast<size_t>(16 * h + i)];
          CHECK(total == sum[static_cast<size_t>(h)], "%s sum %ld", k->name, long(h));
        }
        std::vector<int8_t> all(q.data, q.data + q.n);
        const auto* tail = reinterpret_cast<const int8_t*>(scale.data);
        all.insert(all.end(), tail, tail + scale.n * 4);
        if (k == sets[0]) expected = all;
        CHECK(all == expected, "%s differs from scalar, cols %ld kind %d", k->name, long(cols), kind);
      }
    }
  }
}

void test_quantise_tiles() {
  for (Kind from : {Kind::f32, Kind::f16, Kind::bf16})
    for (int64_t cols : {32, 640, 1023}) {
      const int64_t rows = 33, row_bytes = cols * source(from).bytes;
      std::vector<uint8_t> bytes(static_cast<size_t>(rows * row_bytes));
      for (int64_t i = 0; i < rows * cols; ++i) random_block(from, bytes.data() + i * source(from).bytes);
      std::memset(bytes.data(), 0, static_cast<size_t>(32 * source(from).bytes));  // a block of zeros
      Packed packed(Kind::q8_0, rows, cols);
      quantise_tiles(from, Kind::q8_0, bytes.data(), row_bytes, rows, cols, 0, packed.w.tiles(), packed.quants.data,
                     packed.scales.data);
      std::vector<float> got(static_cast<size_t>(cols));
      for (int64_t n = 0; n < rows; ++n) {
        unpack_row(packed.w, n, got.data());
        for (int64_t k = 0; k < cols; k += 32) {
          float top = 0;
          const auto value = [&](int64_t c) {
            return source_value(from, bytes.data() + n * row_bytes + c * source(from).bytes, 0);
          };
          for (int64_t c = k; c < std::min(k + 32, cols); ++c) top = std::max(top, std::fabs(value(c)));
          // Half a step, and the largest may be cut by the rounding of the scale to fp16 (2^-11, or 2^-25 when
          // subnormal).
          const float allowed = top / 127 * 0.5f + top * 0x1p-11f + 127 * 0x1p-25f;
          for (int64_t c = k; c < std::min(k + 32, cols); ++c)
            CHECK(std::fabs(got[static_cast<size_t>(c)] - value(c)) <= allowed, "%s [%ld, %ld] %g from %g",
                  kNames[int(from)], long(n), long(c), got[static_cast<size_t>(c)], value(c));
        }
      }
    }
}

}  // namespace

int main() {
  std::vector<const Kernels*> sets{scalar_kernels()};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    sets.push_back(avx2_kernels());
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")) sets.push_back(avx512_kernels());
  test_quantise(sets);
  test_quantise_tiles();
  test_four_bits();
  for (Kind kind : {Kind::q4_0, Kind::q8_0, Kind::i4_32, Kind::i4_64, Kind::i4_128, Kind::i8_32, Kind::i8_128})
    for (int64_t rows : {1, 17, 130})
      for (int64_t cols : {3, 33, 256, 1000, 1023}) {
        test_codes(sets, kind, rows, cols, cols);
        test_codes(sets, kind, rows, cols, 32 * layout(kind).super);
        test_codes(sets, kind, rows, cols, 96 * layout(kind).super);
      }
  std::printf("codes done, %d failures\n", failures);
  for (int kind = 0; kind < static_cast<int>(Kind::count); ++kind) {
    const Kind k = static_cast<Kind>(kind);
    for (int64_t cols : {1, 3, 33, 1023, 32, 64, 256, 640, 1024}) {
      if (cols % source(k).cols) continue;
      for (int64_t rows : {1, 15, 16, 17, 31, 33, 130})
        test_kind(sets, k, rows, cols, rows == 33 && cols <= 256 ? 197 : 13);
    }
    test_kind(sets, k, 33, 2304, 50);       // more columns than are unpacked at a time for many rows
    std::printf("%s done, %d failures\n", kNames[kind], failures);
    std::fflush(stdout);
  }
  for (const Kernels* k : sets) std::printf("%s ", k->name);
  std::printf(failures ? "\nFAILED: %d\n" : "\nall passed\n", failures);
  return failures != 0;
}
