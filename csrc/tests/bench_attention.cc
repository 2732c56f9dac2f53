// One core: decode as GB/s of keys and values read, prefill as GFLOP/s of the visible part (4 d a query head and key).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <sys/mman.h>

#include "attention_case.h"

using namespace ridgeline;

namespace {

double now() {   // CPU time of this thread: other processes may have the core meanwhile
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

template <class Body> double best(int repeats, Body body) {
  double t = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double a = now();
    body();
    t = std::min(t, now() - a);
  }
  return t;
}

// kv_heads caches a layer, `layers` layers, so that nothing stays in the cache between steps.
void decode(const AttentionKernels& k, KvType type, int64_t context, int64_t d, int64_t group, int64_t kv_heads,
            bool dot = false) {
  Case c({.type = type, .context = context, .group = group, .d = d, .dv = d, .kv_heads = 1, .bf16_dot = dot}, 1, k);
  const int64_t bytes = 2 * context * d * kv_bytes(type), want = 160 << 20;
  const int64_t copies = std::max<int64_t>(kv_heads, want / bytes);
  // Huge pages, as a cache should have them: with 4 KB pages 10 % (d = 128) to 30 % (d = 64) less.
  const size_t size = c.k_pages.size(), all = (2 * static_cast<size_t>(copies) * size + (2 << 20)) >> 21 << 21;
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(2 << 20, all));
  madvise(memory, all, MADV_HUGEPAGE);
  for (size_t i = 0; i < static_cast<size_t>(copies); ++i) {
    std::memcpy(memory + 2 * i * size, c.k_pages.data(), size);
    std::memcpy(memory + (2 * i + 1) * size, c.v_pages.data(), size);
  }
  Scratch scratch(attention_scratch(d, d));
  int64_t next = 0;
  // about 4 MB a measurement: short enough for a quiet one
  const int64_t batch = std::max<int64_t>(1, (4 << 20) / bytes);
  const double t = best(3 * static_cast<int>(copies / batch), [&] {
    for (int64_t i = 0; i < batch; ++i) {
      AttentionTask task = c.task;
      const auto at = static_cast<size_t>(next++ % copies), then = static_cast<size_t>(next % copies);
      task.k = memory + 2 * at * size, task.v = memory + (2 * at + 1) * size;
      const AttentionAhead ahead{memory + 2 * then * size, memory + (2 * then + 1) * size, task.pages, 0, context};
      task.ahead = &ahead, task.fetched = true;
      k.attention(task, 0, 1, scratch.data);
    }
  });
  std::free(memory);
  const double hot = best(200, [&] { k.attention(c.task, 0, 1, scratch.data); });
  std::printf("%-11s decode%s type %d context %5ld d %3ld G %ld: %6.1f GB/s from memory (%.1f us a KV head), "
              "%6.1f GB/s from cache\n",
              k.name, dot ? " dot" : "", static_cast<int>(type), context, d, group,
                  static_cast<double>(bytes * batch) / t * 1e-9,
              t / static_cast<double>(batch) * 1e6, static_cast<double>(bytes) / hot * 1e-9);
}

// What one core reads now with plain loads: the yardstick beside the decode figures on a shared machine.
void plain_read() {
  const size_t n = size_t{40} << 20, slice = size_t{1} << 20;
  const std::vector<uint32_t> x(n, 1);
  size_t at = 0;
  volatile uint32_t sink = 0;
  const double t = best(120, [&] {
    const uint32_t* p = x.data() + at;
    uint32_t sum = 0;
    for (size_t i = 0; i < slice; ++i) sum += p[i];
    sink = sink + sum;
    at = (at + slice) % n;
  });
  std::printf("plain read: %.1f GB/s\n", static_cast<double>(slice) * 4 / t * 1e-9);
}

void prefill(const AttentionKernels& k, KvType type, int64_t tokens, int64_t context, int64_t d, int64_t group,
    bool dot = false) {
  Case c({.type = type, .tokens = tokens, .context = context, .group = group, .d = d, .dv = d, .kv_heads = 1,
      .bf16_dot = dot}, 1, k);
  Scratch scratch(attention_scratch(d, d));
  const double t = best(5, [&] { k.attention(c.task, 0, tokens, scratch.data); });
  const auto keys = static_cast<double>(tokens) * (static_cast<double>(context) - static_cast<double>(tokens - 1) / 2);
  std::printf("%-11s prefill%s type %d n %ld context %5ld d %3ld G %ld: %6.1f GFLOP/s (%.2f ms)\n", k.name, dot ?
      " dot" : "",
              static_cast<int>(type), tokens, context, d, group,
                  keys * 4 * static_cast<double>(d * group) / t * 1e-9, t * 1e3);
}

}  // namespace

int main(int argc, char**) {
  std::vector<const AttentionKernels*> tables{avx2_attention()};
  if (__builtin_cpu_supports("avx512bw")) tables.insert(tables.begin(), avx512_attention());
  if (argc > 1) tables.resize(1);
  plain_read();
  for (const AttentionKernels* k : tables) {
    for (const int64_t context : {128, 512, 4096}) {
      decode(*k, KvType::bf16, context, 128, 2, 8);
      decode(*k, KvType::bf16, context, 256, 4, 1);
    }
    decode(*k, KvType::bf16, 4096, 64, 4, 8);
    decode(*k, KvType::i8, 4096, 128, 2, 8);
    decode(*k, KvType::f16, 4096, 128, 2, 8);
    prefill(*k, KvType::bf16, 512, 512, 128, 2);
    prefill(*k, KvType::bf16, 512, 4096, 128, 2);
    prefill(*k, KvType::bf16, 512, 512, 256, 4);
    prefill(*k, KvType::bf16, 512, 512, 64, 4);
    if (k->bf16_dot) {
      decode(*k, KvType::bf16, 4096, 128, 2, 8, true);
      decode(*k, KvType::bf16, 4096, 256, 4, 1, true);
      decode(*k, KvType::i8, 4096, 128, 2, 8, true);
      prefill(*k, KvType::i8, 512, 4096, 128, 2, true);
      prefill(*k, KvType::bf16, 512, 512, 128, 2, true);
      prefill(*k, KvType::bf16, 512, 4096, 128, 2, true);
      prefill(*k, KvType::bf16, 512, 512, 256, 4, true);
      prefill(*k, KvType::bf16, 512, 512, 64, 4, true);
    }
    const std::vector<float> x(1 << 16, 0.5f);
    std::vector<float> out(1 << 16);
    for (const Act act : {Act::silu, Act::gelu, Act::gelu_tanh})
      std::printf("%-7s act_mul %d: %.2f ns an element\n", k->name, static_cast<int>(act),
                  best(20, [&] { k->act_mul(x.data(), x.data(), 4096, out.data(), act); }) / 4096 * 1e9);
    std::printf("%-7s rms_norm 1024: %.0f ns\n", k->name,
                best(20, [&] { for (int i = 0; i < 64; ++i) k->rms_norm(x.data() + i * 1024, x.data(), 1024, 1e-6f,
                    out.data() + i * 1024); }) / 64 * 1e9);
  }
}
