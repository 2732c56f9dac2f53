// Attention and the small kernels against fp64 loops, for every instruction set of this machine; to be built with
// AddressSanitizer and UndefinedBehaviorSanitizer.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "attention_case.h"

using namespace ridgeline;

namespace {

int failures = 0, checks = 0;

void check(bool good, const char* kernels, const std::string& what, double error = 0) {
  ++checks;
  if (good) return;
  ++failures;
  std::printf("FAILED %s: %s (error %g)\n", kernels, what.c_str(), error);
}

std::vector<float> noise(size_t n, unsigned seed, float spread = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> x(n);
  for (float& a : x) a = normal(random);
  return x;
}

// Largest |a - b| / (|b| + floor).
template <class B> double difference(const std::vector<float>& a, const std::vector<B>& b, double floor) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double want = static_cast<double>(b[i]);
    const double e = std::abs(static_cast<double>(a[i]) - want) / (std::abs(want) + floor);
    if (!(e <= worst)) worst = std::isnan(e) ? 1e30 : e;
  }
  return worst;
}

void test_norms(const AttentionKernels& k) {
  for (const int64_t n : {1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 256, 640, 1023}) {
    const auto size = static_cast<size_t>(n);
    const auto x = noise(size, 1, 3), w = noise(size, 2), b = noise(size, 3), before = noise(size, 4);
    double square = 0, mean = 0, variance = 0;
    for (const double a : x) square += a * a / static_cast<double>(n), mean += a / static_cast<double>(n);
    for (const double a : x) variance += (a - mean) * (a - mean) / static_cast<double>(n);
    for (int mode = 0; mode < 8; ++mode) {
      const bool add = mode & 1, weighted = mode & 2, layer = mode & 4;
      std::vector<float> out = before;
      std::vector<double> want(size);
      for (size_t i = 0; i < size; ++i) {
        const double a = static_cast<double>(x[i]);
        want[i] = layer ? (a - mean) / std::sqrt(variance + 1e-5) : a / std::sqrt(square + 1e-5);
        if (weighted) want[i] *= static_cast<double>(w[i]);
        if (weighted && layer) want[i] += static_cast<double>(b[i]);
        if (add) want[i] += static_cast<double>(before[i]);
      }
      const float* weight = weighted ? w.data() : nullptr;
      if (layer) (add ? k.layer_norm_add : k.layer_norm)(x.data(), weight, weighted ? b.data() : nullptr, n, 1e-5f,
          out.data());
      else (add ? k.rms_norm_add : k.rms_norm)(x.data(), weight, n, 1e-5f, out.data());
      const double e = difference(out, want, 1);
      if (n > 1 || !layer) check(e < 3e-6, k.name, "norm mode " + std::to_string(mode) + " n " + std::to_string(n), e);
    }
  }
}

void test_rope(const AttentionKernels& k) {
  for (const int64_t half : {1, 5, 8, 16, 20, 32, 40, 64, 128}) {
    const auto size = static_cast<size_t>(half);
    std::vector<float> x = noise(2 * size + 3, 5), cos(size), sin(size);
    std::vector<double> want(x.begin(), x.end());
    for (size_t i = 0; i < size; ++i) {
      cos[i] = std::cos(static_cast<float>(i)), sin[i] = std::sin(static_cast<float>(i));
      const double c = static_cast<double>(cos[i]), s = static_cast<double>(sin[i]), a = want[i], b = want[i + size];
      want[i] = a * c - b * s, want[i + size] = b * c + a * s;
    }
    k.rope(x.data(), cos.data(), sin.data(), half);
    const double e = difference(x, want, 1);
    check(e < 1e-6, k.name, "rope half " + std::to_string(half), e);
  }
}

void test_hadamard(const AttentionKernels& k) {
  for (const int64_t n : {1, 2, 7, 20, 24, 64, 80, 96, 128, 256, 512}) {
    auto x = noise(static_cast<size_t>(n), 21);
    const int64_t size = n & -n;
    std::vector<double> want;
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < size; ++j)
        sum += (__builtin_popcountll(static_cast<uint64_t>(i % size & j)) % 2 ? -1 : 1) *
            static_cast<double>(x[static_cast<size_t>(i / size * size + j)]);
      want.push_back(sum / std::sqrt(static_cast<double>(size)));
    }
    auto twin = x;
    k.hadamard(x.data(), n);
    const double e = difference(x, want, 1);
    check(e < 1e-6, k.name, "hadamard " + std::to_string(n), e);
    scalar_attention()->hadamard(twin.data(), n);
    check(twin == x, k.name, "hadamard equals the scalar twin's bits");
  }
}

void test_activations(const AttentionKernels& k) {
  std::vector<float> x;
  for (float a = -30; a < 30; a += 0.00137f) x.push_back(a);
  for (const float a : {0.0f, -0.0f, 1e-20f, -1e-20f, 1e-6f, -1e-6f, 500.0f, -500.0f}) x.push_back(a);
  for (const Act act : {Act::silu, Act::gelu, Act::gelu_tanh, Act::relu}) {
    std::vector<double> want;
    for (const double a : x) {
      const double u = std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a);
      want.push_back(act == Act::silu ? a / (1 + std::exp(-a)) : act == Act::gelu ?
          a * 0.5 * std::erfc(-a / std::sqrt(2.0))
                     : act == Act::relu ? std::max(a, 0.0) : a / (1 + std::exp(-2 * u)));
    }
    std::vector<float> out(x.size());
    k.act_mul(x.data(), nullptr, static_cast<int64_t>(x.size()), out.data(), act);
    // The tail's exp(-z^2) carries the rounding of z^2: 1e-6 near 0, 8e-6 at z = 8.
    double e = difference(out, want, 1e-7);
    check(e < 2e-6, k.name, "activation " + std::to_string(static_cast<int>(act)), e);
    e = difference(out, want, 1e-30);
    check(e < 2e-5, k.name, "activation tail " + std::to_string(static_cast<int>(act)), e);
    for (const size_t n : {size_t{1}, size_t{7}, size_t{9}, size_t{33}}) {
      const auto gate = noise(n, 6), up = noise(n, 7);
      std::vector<float> y(n), alone(n);
      k.act_mul(gate.data(), nullptr, static_cast<int64_t>(n), alone.data(), act);
      k.act_mul(gate.data(), up.data(), static_cast<int64_t>(n), y.data(), act);
      bool same = true;
      for (size_t i = 0; i < n; ++i) same &= y[i] == alone[i] * up[i];
      check(same, k.name, "act_mul is act times up");
    }
  }
  std::vector<float> bad{std::nanf(""), 1}, out(2);
  k.act_mul(bad.data(), nullptr, 2, out.data(), Act::silu);
  check(std::isnan(out[0]) && !std::isnan(out[1]), k.name, "NaN stays NaN");
}

void test_store(const AttentionKernels& k) {
  std::vector<float> x = noise(1003, 8, 10);
  for (const float a : {0.0f, -0.0f, 1e-40f, -1e-40f, 3e-8f, 2.98e-8f, 6.1e-5f, 65504.0f, 65519.0f, 65520.0f, -1e30f,
      1.00390625f,
                        1.01171875f, 2049.0f, 2051.0f, 3e38f, 0.999999f, INFINITY, -INFINITY})
    x.push_back(a);
  const auto n = static_cast<int64_t>(x.size());
  std::vector<uint16_t> bf(x.size()), half(x.size()), same(x.size());
  k.store_kv(x.data(), n, KvType::bf16, bf.data(), nullptr);
  k.store_kv(x.data(), n, KvType::f16, half.data(), nullptr);
  bool good = true;
  for (size_t i = 0; i < x.size(); ++i) {
    good &= half[i] == __builtin_bit_cast(uint16_t, static_cast<_Float16>(x[i]));
    const uint32_t u = __builtin_bit_cast(uint32_t, x[i]), rest = u & 0xffff;
    const uint32_t up = rest > 0x8000 || (rest == 0x8000 && (u >> 16 & 1));
    good &= bf[i] == static_cast<uint16_t>((u >> 16) + up);
  }
  check(good, k.name, "bf16 and fp16 rounding");
  const float nan = std::nanf("");
  uint16_t a = 0, b = 0;
  k.store_kv(&nan, 1, KvType::bf16, &a, nullptr);
  k.store_kv(&nan, 1, KvType::f16, &b, nullptr);
  check((a & 0x7f80) == 0x7f80 && (a & 0x7f) && (b & 0x7c00) == 0x7c00 && (b & 0x3ff), k.name, "NaN in the cache");
  for (const int64_t m : {1, 7, 64, 80, 131}) {
    const auto row = noise(static_cast<size_t>(m), 9);
    std::vector<int8_t> q(static_cast<size_t>(m));
    float scale = 0;
    k.store_kv(row.data(), m, KvType::i8, q.data(), &scale);
    double worst = 0;
    for (size_t i = 0; i < row.size(); ++i) worst = std::max(worst,
        std::abs(static_cast<double>(row[i]) - q[i] * static_cast<double>(scale)));
    check(worst <= static_cast<double>(scale) * 0.5001, k.name, "int8 row", worst);
  }
}

std::string name(const Shape& s) {
  char text[200];
  std::snprintf(text, sizeof text, "type %d n %ld context %ld G %ld d %ld dv %ld page %ld "
                "window %ld cap %g sinks %d tree %d see %d",
                static_cast<int>(s.type), s.tokens, s.context, s.group, s.d, s.dv, s.page_size, s.window,
                static_cast<double>(s.softcap), s.sinks, s.tree, s.see);
  return text;
}

// Tokens [first, last) through parts and combine, as decode splits them.
void by_parts(const AttentionKernels& k, const AttentionTask& task, int64_t first, int64_t last) {
  Scratch scratch(attention_scratch(task.d, task.dv));
  int64_t a, b;
  attention_chunks(task, first, last, &a, &b);
  const auto rows = static_cast<size_t>((last - first) * task.group), parts = static_cast<size_t>(b - a);
  std::vector<float> m(parts * rows), l(parts * rows), acc(parts * rows * static_cast<size_t>(task.dv));
  for (size_t p = parts; p-- > 0;)   // any order of computation
    k.attention_part(task, first, last, a + static_cast<int64_t>(p), scratch.data, m.data() + p * rows,
        l.data() + p * rows,
                     acc.data() + p * rows * static_cast<size_t>(task.dv));
  k.attention_combine(task, first, last, b - a, m.data(), l.data(), acc.data());
}

void test_case(const AttentionKernels& k, const Shape& s, unsigned seed) {
  Case c(s, seed, k);
  Scratch scratch(attention_scratch(s.d, s.dv));
  k.attention(c.task, 0, s.tokens, scratch.data);
  const double e = difference(c.out, c.solve(), 1);
  // bf16 dot products: rounding a query moves a score by about 2^-10 of its size; with 16 bits by 2^-16 of its largest.
  const bool integers = s.bf16_dot && s.type == KvType::i8 && s.d % 64 == 0 && s.dv % 64 == 0;
  check(e < (integers ? 5e-4 : s.bf16_dot ? 0.02 : s.spread > 2 ? 2e-5 : 4e-6), k.name, name(s), e);
  const std::vector<float> whole = c.out;
  const auto again = [&](const char* how, auto run) {
    std::fill(c.out.begin(), c.out.end(), -77.0f);
    run();
    check(std::memcmp(whole.data(), c.out.data(), whole.size() * 4) == 0, k.name, std::string(how) + ": " + name(s),
          difference(c.out, whole, 1));
  };
  again("parts", [&] { by_parts(k, c.task, 0, s.tokens); });
  again("alone", [&] { for (int64_t t = 0; t < s.tokens; ++t) k.attention(c.task, t, t + 1, scratch.data); });
  again("chunks", [&] {
    for (int64_t t = 0, step = 1; t < s.tokens; t += step, step = step % 7 + 2) {
      if (step % 2) k.attention(c.task, t, std::min(t + step, s.tokens), scratch.data);
      else by_parts(k, c.task, t, std::min(t + step, s.tokens));
    }
  });
  AttentionAhead ahead{c.task.k, c.task.v, c.task.pages, s.context / 3, s.context};
  again("fetching ahead", [&] {
    AttentionTask task = c.task;
    task.ahead = &ahead;
    for (int64_t t = 0; t < s.tokens; ++t, task.fetched = true) k.attention(task, t, t + 1, scratch.data);
  });
  if (s.tree || s.see != Shape::causal) return;
  // The same run in slices that were cached earlier: a token sees nothing behind itself.
  again("sliced run", [&] {
    for (int64_t t = 0, step = 1; t < s.tokens; t += step, step = step % 19 + 5) {
      const int64_t n = std::min(step, s.tokens - t);
      AttentionTask slice = c.task;
      slice.q += t * slice.q_token, slice.out += t * slice.out_token;
      slice.lo += t, slice.hi += t, slice.position += t;
      slice.tokens = n, slice.run_start += t, slice.context = slice.run_start + n;
      k.attention(slice, 0, n, scratch.data);
    }
  });
}

void test_attention(const AttentionKernels& k) {
  unsigned seed = 100;
  const auto run = [&](Shape s) { test_case(k, s, ++seed); };
  for (const KvType type : {KvType::f32, KvType::bf16, KvType::f16, KvType::i8}) {
    for (const int64_t d : {64, 80, 96, 128, 256, 20, 7})
      for (const int64_t context : {1, 77, 300}) run({.type = type, .context = context, .group = 2, .d = d, .dv = d});
    for (int64_t group = 1; group <= 8; ++group)
      run({.type = type, .tokens = 5, .context = 133, .group = group, .d = 64, .dv = 80});
    run({.type = type, .tokens = 61, .context = 61, .group = 3, .page_size = 8});
    run({.type = type, .tokens = 67, .context = 530, .group = 2, .page_size = 64});
    run({.type = type, .tokens = 33, .context = 600, .group = 2, .window = 100, .softcap = 20, .sinks = true});
    run({.type = type, .tokens = 40, .context = 700, .window = 5, .spread = 8});
    run({.type = type, .tokens = 31, .context = 290, .group = 4, .softcap = 5, .sinks = true, .spread = 4});
    run({.type = type, .tokens = 19, .context = 340, .group = 2, .tree = true});
    run({.type = type, .tokens = 64, .context = 300, .group = 2, .window = 9, .tree = true});
    run({.type = type, .tokens = 100, .context = 170, .window = 30, .sinks = true, .tree = true});
    run({.type = type, .tokens = 50, .context = 333, .group = 2, .see = Shape::block});
    run({.type = type, .tokens = 50, .context = 333, .group = 2, .window = 40, .see = Shape::block});
    run({.type = type, .tokens = 45, .context = 301, .group = 2, .see = Shape::all});
    run({.type = type, .tokens = 20, .context = 301, .window = 50, .position_shift = 17});
  }
  for (const KvType type : {KvType::bf16, KvType::i8}) {
    if (!k.bf16_dot) break;
    for (const int64_t d : {32, 64, 96, 128, 256})
      for (int64_t group = 1; group <= 8; ++group)
        run({.type = type, .tokens = 5 + group, .context = 133 + 60 * group, .group = group, .d = d, .dv = d,
            .bf16_dot = true});
    run({.type = type, .tokens = 33, .context = 600, .group = 2, .window = 100, .softcap = 20, .sinks = true,
        .bf16_dot = true});
    run({.type = type, .tokens = 100, .context = 370, .window = 30, .sinks = true, .tree = true, .bf16_dot = true});
    run({.type = type, .tokens = 50, .context = 333, .group = 2, .see = Shape::block, .bf16_dot = true});
    run({.type = type, .tokens = 3, .context = 90, .group = 2, .d = 80, .dv = 80, .bf16_dot = true});   // not by pairs
  }
  run({.context = 4099, .group = 2, .d = 128, .dv = 128});
}

void test_twin(const AttentionKernels& k) {   // close to the scalar twin, whose polynomials are the same
  const Shape s{.tokens = 30, .context = 301, .group = 2, .d = 64, .dv = 64, .softcap = 30};
  Case a(s, 5, k), b(s, 5, *scalar_attention());
  Scratch scratch(attention_scratch(s.d, s.dv));
  k.attention(a.task, 0, s.tokens, scratch.data);
  scalar_attention()->attention(b.task, 0, s.tokens, scratch.data);
  check(a.k_pages == b.k_pages && a.v_pages == b.v_pages, k.name, "cache equals the scalar twin's");
  const double e = difference(a.out, b.out, 1);
  check(e < 3e-6, k.name, "scalar twin", e);
}

}  // namespace

int main() {
  std::vector<const AttentionKernels*> tables{scalar_attention()};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(avx2_attention());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    tables.push_back(avx512_attention());
  for (const AttentionKernels* k : tables) {
    test_norms(*k);
    test_rope(*k);
    test_hadamard(*k);
    test_activations(*k);
    test_store(*k);
    test_attention(*k);
    test_twin(*k);
    std::printf("%s: %d checks, %d failed\n", k->name, checks, failures);
  }
  return failures != 0;
}
