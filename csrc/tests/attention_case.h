// A random paged attention problem and its fp64 solution, by plain loops over keys.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "../attention.h"

namespace ridgeline {

struct Shape {
  KvType type = KvType::bf16;
  int64_t tokens = 1, context = 1, group = 1, d = 64, dv = 64, page_size = 16, window = 0, kv_heads = 2;
  float softcap = 0;
  bool sinks = false, tree = false;
  enum See { causal, block, all } see = causal;
  float spread = 1;          // of the queries: large values make the softmax sharp
  int64_t position_shift = 0;
  bool bf16_dot = false;
};

// Scratch that ends exactly where attention_scratch says, aligned to 64 bytes; the sanitiser watches its end.
struct Scratch {
  float* data;
  explicit Scratch(int64_t n) {
    data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((n + 15) / 16 * 64)));
    for (int64_t i = 0; i < (n + 15) / 16 * 16; ++i) data[i] = std::numeric_limits<float>::quiet_NaN();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data); }
};

struct Case {
  Shape shape;
  int64_t pages_total, used;
  std::vector<float> q, k, v, out, sinks, k_scale, v_scale;   // k, v: (context, d) as the cache gives them back
  std::vector<uint8_t> k_pages, v_pages;
  std::vector<int64_t> table, lo, hi, position, parent;
  std::vector<uint64_t> ancestors;
  AttentionTask task{};

  Case(const Shape& s, unsigned seed, const AttentionKernels& kernels) : shape(s) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t ps = s.page_size, head = s.kv_heads - 1, start = s.context - s.tokens;
    used = (s.context + ps - 1) / ps;
    pages_total = used + 3;
    for (int64_t i = 0; i < pages_total; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), random);
    table.resize(static_cast<size_t>(used));
    const int64_t bytes = kv_bytes(s.type), k_page = s.kv_heads * ps * s.d, v_page = s.kv_heads * ps * s.dv;
    // What no live key wrote is NaN: reading it into a result would show.
    k_pages.assign(static_cast<size_t>(pages_total * k_page * bytes), 0xff);
    v_pages.assign(static_cast<size_t>(pages_total * v_page * bytes), 0xff);
    k_scale.assign(static_cast<size_t>(pages_total * s.kv_heads * ps), std::numeric_limits<float>::quiet_NaN());
    v_scale = k_scale;
    const auto write = [&](std::vector<uint8_t>& pages, std::vector<float>& scales, std::vector<float>& back, int64_t n,
                           int64_t page_stride, int64_t j) {
      std::vector<float> row(static_cast<size_t>(n));
      for (float& x : row) x = normal(random);
      const int64_t page = table[static_cast<size_t>(j / ps)], slot = head * ps + j % ps;
      uint8_t* at = pages.data() + (page * page_stride + slot * n) * bytes;
      float& scale = scales[static_cast<size_t>(page * s.kv_heads * ps + slot)];
      kernels.store_kv(row.data(), n, s.type, at, &scale);
      for (int64_t i = 0; i < n; ++i) back.push_back(read(at, i, scale));
    };
    for (int64_t j = 0; j < s.context; ++j) {
      write(k_pages, k_scale, k, s.d, k_page, j);
      write(v_pages, v_scale, v, s.dv, v_page, j);
    }
    const auto count = static_cast<size_t>(s.tokens * s.group);
    q.resize(count * static_cast<size_t>(s.d));
    for (float& x : q) x = normal(random) * s.spread;
    out.assign(count * static_cast<size_t>(s.dv), -77.0f);
    for (int64_t g = 0; g < s.group; ++g) sinks.push_back(normal(random) * 3);
    const int64_t words = (s.tokens + 63) / 64;
    ancestors.assign(static_cast<size_t>(s.tokens * words), 0);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const int64_t at = start + t;
      lo.push_back(s.see == Shape::block ? start / 3 : 0);
      hi.push_back(s.see == Shape::causal ? at + 1 : s.see == Shape::all ? s.context : std::min((at / 7 + 1) * 7,
          s.context));
      parent.push_back(t == 0 ? -1 : static_cast<int64_t>(random() % static_cast<unsigned>(t + 1)) - 1);
      const int64_t p = parent.back();
      position.push_back(s.position_shift + (!s.tree ? at : p < 0 ? start : position[static_cast<size_t>(p)] + 1));
      for (int64_t w = 0; w < words && p >= 0; ++w)
        ancestors[static_cast<size_t>(t * words + w)] = ancestors[static_cast<size_t>(p * words + w)];
      ancestors[static_cast<size_t>(t * words + t / 64)] |= uint64_t{1} << (t % 64);
    }
    task = {q.data(), s.group * s.d, s.d, out.data(), s.group * s.dv, s.dv, s.tokens, s.group, s.d, s.dv,
            1.0f / std::sqrt(static_cast<float>(s.d)), s.softcap, s.sinks ? sinks.data() : nullptr, s.window,
                table.data(),
            ps, s.context, start, lo.data(), hi.data(), position.data(), s.tree ? ancestors.data() : nullptr,
                s.bf16_dot,
            s.type,
            k_pages.data() + head * ps * s.d * bytes, v_pages.data() + head * ps * s.dv * bytes, k_page, v_page,
            k_scale.data() + head * ps, v_scale.data() + head * ps, s.kv_heads * ps};
  }
  Case(const Case&) = delete;

  float read(const uint8_t* row, int64_t i, float scale) const {
    const auto word = [&] { return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[i]); };
    switch (shape.type) {
      case KvType::f32: return reinterpret_cast<const float*>(row)[i];
      case KvType::bf16: return __builtin_bit_cast(float, word() << 16);
      case KvType::i8: return static_cast<float>(reinterpret_cast<const int8_t*>(row)[i]) * scale;
      default: break;
    }
    const uint32_t h = word();
    const double size = (h >> 10 & 31) ? std::ldexp(1024 + (h & 1023), static_cast<int>(h >> 10 & 31) - 25)
                                       : std::ldexp(h & 1023, -24);
    return static_cast<float>(h & 0x8000 ? -size : size);
  }

  bool visible(int64_t t, int64_t j) const {   // Batch.mask, word for word
    const auto i = static_cast<size_t>(t);
    if (j < lo[i] || j >= hi[i]) return false;
    const int64_t own = j - task.run_start;
    if (own >= 0 && shape.tree) {
      int64_t a = t;
      while (a >= 0 && a != own) a = parent[static_cast<size_t>(a)];
      if (a != own) return false;
    }
    const int64_t at = own < 0 ? j : position[static_cast<size_t>(own)];
    return shape.window == 0 || at > position[i] - shape.window;
  }

  std::vector<double> solve() const {
    std::vector<double> result;
    const auto& s = shape;
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t g = 0; g < s.group; ++g) {
        std::vector<double> score(static_cast<size_t>(s.context), -INFINITY), sum(static_cast<size_t>(s.dv));
        double top = s.sinks ? static_cast<double>(sinks[static_cast<size_t>(g)]) : -INFINITY, total = 0;
        for (int64_t j = 0; j < s.context; ++j) {
          if (!visible(t, j)) continue;
          double dot = 0;
          for (int64_t i = 0; i < s.d; ++i)
            dot += static_cast<double>(q[static_cast<size_t>((t * s.group + g) * s.d + i)]) *
                   static_cast<double>(k[static_cast<size_t>(j * s.d + i)]);
          dot *= static_cast<double>(task.scale);
          const auto cap = static_cast<double>(s.softcap);
          if (cap > 0) dot = cap * std::tanh(dot / cap);
          score[static_cast<size_t>(j)] = dot;
          top = std::max(top, dot);
        }
        for (int64_t j = 0; j < s.context; ++j) {
          const double p = std::exp(score[static_cast<size_t>(j)] - top);
          if (p == 0) continue;
          total += p;
          for (int64_t i = 0; i < s.dv; ++i)
            sum[static_cast<size_t>(i)] += p * static_cast<double>(v[static_cast<size_t>(j * s.dv + i)]);
        }
        if (s.sinks) total += std::exp(static_cast<double>(sinks[static_cast<size_t>(g)]) - top);
        for (const double x : sum) result.push_back(x / total);
      }
    return result;
  }
};

}  // namespace ridgeline
