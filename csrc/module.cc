// Bindings: checks and conversions only. Tensors come as addresses; their owners keep them alive during a call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <limits>
#include <optional>
#include <stdexcept>

#include "batch.h"
#include "blocks.h"
#include "pack.h"
#include "packed.h"
#include "probe.h"
#include "kernels/head.h"

namespace nb = nanobind;
using namespace ridgeline;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Address = uintptr_t;

const std::pair<const char*, Kind> kKinds[] = {
    {"Q4_0", Kind::q4_0},     {"Q4_1", Kind::q4_1},     {"Q5_0", Kind::q5_0}, {"Q5_1", Kind::q5_1},
    {"Q8_0", Kind::q8_0},     {"Q2_K", Kind::q2_k},     {"Q3_K", Kind::q3_k}, {"Q4_K", Kind::q4_k},
    {"Q5_K", Kind::q5_k},     {"Q6_K", Kind::q6_k},     {"IQ4_NL", Kind::iq4_nl}, {"IQ4_XS", Kind::iq4_xs},
    {"F16", Kind::f16},       {"BF16", Kind::bf16},     {"F32", Kind::f32}};

Kind kind_of(const std::string& name) {
  for (const auto& [n, kind] : kKinds)
    if (name == n) return kind;
  throw std::invalid_argument("weights of type " + name + " have no native kernel");
}

template <class T> T one_of(const std::string& name, std::initializer_list<std::pair<const char*, T>> all, const char* what) {
  for (const auto& [n, value] : all)
    if (name == n) return value;
  throw std::invalid_argument(std::string(what) + " " + name + " has no native kernel");
}

Act act_of(const std::string& name) {
  return one_of<Act>(name, {{"silu", Act::silu}, {"swish", Act::silu}, {"gelu", Act::gelu}, {"gelu_new", Act::gelu_tanh},
                            {"gelu_pytorch_tanh", Act::gelu_tanh}, {"gelu_tanh", Act::gelu_tanh}, {"relu", Act::relu}}, "activation");
}
Precision precision_of(const std::string& name) {
  return one_of<Precision>(name, {{"int8", Precision::i8}, {"bfloat16", Precision::bf16}, {"float32", Precision::f32}},
                           "activation dtype");
}
KvType kv_of(const std::string& name) {
  return one_of<KvType>(name, {{"float32", KvType::f32}, {"bfloat16", KvType::bf16}, {"float16", KvType::f16},
                           {"int8", KvType::i8}}, "KV cache dtype");
}

std::shared_ptr<Matrix> make_matrix(Kind kind, int64_t rows, int64_t cols, bool split) {
  if (split && (kind != Kind::q8_0 || cols > kHeadBlocks * kBlock))
    throw std::invalid_argument("only Q8_0 weights of up to " + std::to_string(kHeadBlocks * kBlock) + " columns can be split");
  auto m = std::make_shared<Matrix>();
  m->kind = kind, m->rows = rows, m->cols = cols;
  const size_t tiles = static_cast<size_t>((rows + kTile - 1) / kTile), quants = tiles * tile_quants(kind, cols);
  m->scales = Buffer(tiles * tile_scales(kind, cols));
  m->quants = Buffer(split ? quants / 2 : quants);
  if (split) m->low = Buffer(quants / 2);
  return m;
}

std::shared_ptr<Matrix> allocate(const std::string& type, int64_t rows, int64_t cols, bool quantise, bool split,
                                 const std::string& into) {
  const Kind from = kind_of(type), kind = quantise ? kind_of(into) : from;
  if (rows < 1 || cols < 1 || cols % source(from).cols)
    throw std::invalid_argument("no matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " " + type + " weights");
  if (quantise && !is_float(from)) throw std::invalid_argument(type + " weights are quantised already");
  if (quantise && !quantises_to(kind)) throw std::invalid_argument("float weights cannot be quantised to " + into + " here");
  return make_matrix(kind, rows, cols, split);
}

// Packs n rows from `first_row` on, which begins a tile: pack(first tile of these, tiles, where they go) on all threads.
template <class Pack>
void fill_tiles(Engine& engine, Matrix& m, int64_t n, int64_t first_row, Pack&& pack) {
  if (first_row < 0 || first_row % kTile || first_row + n > m.rows || (first_row + n < m.rows && n % kTile))
    throw std::invalid_argument("rows " + std::to_string(first_row) + " to " + std::to_string(first_row + n) +
                                " are not whole tiles of a matrix of " + std::to_string(m.rows) + " rows");
  const int64_t tiles = (n + kTile - 1) / kTile, bytes = tile_quants(m.kind, m.cols), half = bytes / 2;
  const int64_t scale_bytes = tile_scales(m.kind, m.cols);
  uint8_t* scales = m.scales.data() + first_row / kTile * scale_bytes;
  uint8_t* quants = m.quants.data() + first_row / kTile * (m.split() ? half : bytes);
  uint8_t* low = m.low.data() + first_row / kTile * half;
  nb::gil_scoped_release free;
  engine.team.run([&](int thread) {
    const Range t = share(tiles, thread, engine.team.size());
    if (!m.split()) return pack(t.first, t.last - t.first, quants + t.first * bytes, scales + t.first * scale_bytes);
    Buffer tile(static_cast<size_t>(bytes));
    for (int64_t i = t.first; i < t.last; ++i) {      // one tile at a time: no second copy of the matrix
      pack(i, 1, tile.data(), scales + i * scale_bytes);
      split_tile(tile.data(), bytes, quants + i * half, low + i * half);
    }
  });
}

// Packs `rows` (of the type that the matrix was allocated for) from row `first_row` on, which begins a tile.
void fill(Engine& engine, Matrix& m, const std::string& type, Bytes rows, int64_t first_row) {
  const Kind from = kind_of(type);
  const Source s = source(from);
  const int64_t n = static_cast<int64_t>(rows.shape(0)), row_bytes = static_cast<int64_t>(rows.shape(1)), cols = m.cols;
  if (row_bytes != cols / s.cols * s.bytes)
    throw std::invalid_argument("a row of " + std::to_string(cols) + " " + type + " weights cannot have " +
                                std::to_string(row_bytes) + " bytes");
  const bool quantise = from != m.kind;
  if (quantise && !(is_float(from) && quantises_to(m.kind)))
    throw std::invalid_argument("a matrix of another type cannot take " + type + " weights");
  const uint8_t* data = rows.data();
  fill_tiles(engine, m, n, first_row, [&](int64_t tile, int64_t count, uint8_t* quants, uint8_t* scales) {
    const uint8_t* at = data + tile * kTile * row_bytes;
    if (quantise) quantise_tiles(from, m.kind, at, row_bytes, n - tile * kTile, cols, 0, count, quants, scales);
    else pack_tiles(from, at, row_bytes, n - tile * kTile, cols, 0, count, quants, scales);
  });
}

// A matrix for codes: of a grouped kind, Q4_0 or Q8_0.
std::shared_ptr<Matrix> allocate_codes(const std::string& type, int64_t rows, int64_t cols, bool split) {
  const Kind kind = one_of<Kind>(type, {{"INT4_G32", Kind::i4_32}, {"INT4_G64", Kind::i4_64}, {"INT4_G128", Kind::i4_128},
                                        {"INT8_G32", Kind::i8_32}, {"INT8_G128", Kind::i8_128}, {"Q4_0", Kind::q4_0},
                                        {"Q8_0", Kind::q8_0}}, "a matrix of codes of type");
  if (rows < 1 || cols < 1) throw std::invalid_argument("no matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " codes");
  return make_matrix(kind, rows, cols, split);
}

// Packs rows of codes from `first_row` on, with a scale and a zero for each `group` columns of a row: see Codes.
void fill_codes(Engine& engine, Matrix& m, Bytes codes, Table<float> scales, Table<int8_t> zeros, int64_t group,
                int64_t first_row) {
  const Codes from{codes.data(), scales.data(), zeros.data(), static_cast<int64_t>(codes.shape(0)),
                   static_cast<int64_t>(codes.shape(1)), group, static_cast<int64_t>(scales.shape(1))};
  const int64_t own = kBlock * layout(m.kind).super;
  if (!takes_codes(m.kind) || from.cols != m.cols || group < 1 || (group % own && group < m.cols) ||
      from.groups != (m.cols + group - 1) / group || scales.shape(0) != codes.shape(0) ||
      zeros.shape(0) != scales.shape(0) || zeros.shape(1) != scales.shape(1))
    throw std::invalid_argument("these codes, scales and zeros do not fit a matrix of " + std::to_string(m.cols) + " columns");
  fill_tiles(engine, m, from.rows, first_row, [&](int64_t tile, int64_t count, uint8_t* quants, uint8_t* scale) {
    const int64_t row = tile * kTile;
    const Codes part{from.codes + row * from.cols, from.scales + row * from.groups, from.zeros + row * from.groups,
                     from.rows - row, from.cols, from.group, from.groups};
    pack_codes(m.kind, part, 0, count, quants, scale);
  });
}

std::shared_ptr<Matrix> pack(Engine& engine, const std::string& type, Bytes rows, int64_t cols, bool quantise, bool split,
                             const std::string& into) {
  auto m = allocate(type, static_cast<int64_t>(rows.shape(0)), cols, quantise, split, into);
  fill(engine, *m, type, rows, 0);
  return m;
}

Batch* make_batch(Integers offsets, Integers starts, Address positions, Address lo, Address hi, Address slots, Address page_table,
                  int64_t pages, int64_t page_size, const std::vector<std::optional<Integers>>& parents) {
  const auto pointer = [](Address a) { return reinterpret_cast<const int64_t*>(a); };
  return batch_over(std::move(offsets), std::move(starts), pointer(positions), pointer(lo), pointer(hi), pointer(slots),
                    pointer(page_table), pages, page_size, parents).release();
}

void check_ids(const Matrix& m, const int64_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= m.rows) throw std::invalid_argument("token id " + std::to_string(ids[i]) + " is out of range");
}

void lookup(Engine& engine, const Matrix& m, Address tokens, int64_t count, Address out) {
  const int64_t* ids = reinterpret_cast<const int64_t*>(tokens);
  check_ids(m, ids, count);
  nb::gil_scoped_release free;
  engine.lookup(m, ids, count, reinterpret_cast<float*>(out));
}

// layer (none: of no layer), part, rows, start and end in ns of the monotonic clock
using Traced = std::tuple<std::optional<int64_t>, std::string, int64_t, int64_t, int64_t>;

std::vector<Traced> take_trace(Engine& engine) {
  std::vector<Traced> found;
  for (const Event& e : engine.trace.events)
    found.emplace_back(e.layer < 0 ? std::nullopt : std::optional(e.layer), kPartNames[static_cast<int>(e.part)], e.rows,
                       e.start_ns, e.end_ns);
  engine.trace.events.clear();
  return found;
}

// See probe.h.
double read_bandwidth(Engine& engine, int64_t bytes, int64_t repeats) {
  if (bytes < engine.team.size() * int64_t{512} || repeats < 1)
    throw std::invalid_argument("the buffer to read is too small: " + std::to_string(bytes) + " bytes, " +
                                std::to_string(repeats) + " times");
  return ridgeline::read_bandwidth(engine.team, bytes, repeats);
}

KvView kv_view(const AttentionBlock& block, KvType type, Address k, Address v, Address k_scale, Address v_scale) {
  if ((type == KvType::i8) != (k_scale && v_scale)) throw std::invalid_argument("an int8 KV cache has scales, others have none");
  return {type, reinterpret_cast<void*>(k), reinterpret_cast<void*>(v), block.kv_heads, block.d, block.d,
          reinterpret_cast<float*>(k_scale), reinterpret_cast<float*>(v_scale)};
}

// The caches and rotations of a whole pass, checked. kv: addresses of K, V and their scales for each layer; rope: of cos and sin;
// wanted: rows that are read, none = all.
struct Whole {
  std::vector<KvView> kv;
  std::vector<Rope> rope;

  Whole(const Model& model, const Batch& batch, const std::string& dtype, const std::vector<Address>& kv_at,
        const std::vector<Address>& rope_at, bool by_position, const std::optional<Integers>& wanted) {
    const size_t count = model.blocks.size();
    const int64_t tokens = static_cast<int64_t>(batch.tokens.size());
    if (kv_at.size() != 4 * count || rope_at.size() != 2 * count)
      throw std::invalid_argument("layers need four addresses of a cache and two of a rotation each");
    if (tokens != batch.view.tokens) throw std::invalid_argument("a whole pass needs a batch with its tokens");
    check_ids(*model.embedding, batch.tokens.data(), tokens);
    if (wanted && std::any_of(wanted->begin(), wanted->end(), [&](int64_t i) { return i < 0 || i >= tokens; }))
      throw std::invalid_argument("a wanted row is not in the batch");
    const KvType type = kv_of(dtype);
    for (size_t i = 0; i < count; ++i) {
      kv.push_back(kv_view(*model.blocks[i].first, type, kv_at[4 * i], kv_at[4 * i + 1], kv_at[4 * i + 2], kv_at[4 * i + 3]));
      rope.push_back({reinterpret_cast<const float*>(rope_at[2 * i]), reinterpret_cast<const float*>(rope_at[2 * i + 1]),
                      by_position});
    }
  }
};

void forward(Engine& engine, const Model& model, const Batch& batch, const std::string& dtype, const std::vector<Address>& kv,
             const std::vector<Address>& rope, bool by_position, const std::optional<Integers>& wanted, Address out) {
  const Whole whole(model, batch, dtype, kv, rope, by_position, wanted);
  nb::gil_scoped_release free;
  engine.forward(model, batch.tokens.data(), batch.view, whole.kv.data(), whole.rope.data(), wanted ? &*wanted : nullptr,
                 reinterpret_cast<float*>(out));
}

void check_greedy(const Linear& head, int64_t rows) {
  if (!head.bias.empty()) throw std::invalid_argument("greedy knows no bias");
  if (!head.matrix->split()) throw std::invalid_argument("greedy needs a split head");
  if (rows < 1 || rows > kHeadRows) throw std::invalid_argument("greedy takes 1 to " + std::to_string(kHeadRows) + " rows");
}

// -> the most likely token of each wanted row, and how many rows of the head were scored from all their bytes.
std::pair<Integers, int64_t> best(Engine& engine, const Model& model, const Batch& batch, const std::string& dtype,
                                  const std::vector<Address>& kv, const std::vector<Address>& rope, bool by_position,
                                  const std::optional<Integers>& wanted, const Linear& head, bool prune) {
  const Whole whole(model, batch, dtype, kv, rope, by_position, wanted);
  const int64_t rows = wanted ? static_cast<int64_t>(wanted->size()) : batch.view.tokens;
  if (prune) check_greedy(head, rows);
  if (head.matrix->cols != model.embedding->cols) throw std::invalid_argument("the head takes rows of another width");
  nb::gil_scoped_release free;
  Integers tokens(static_cast<size_t>(rows));
  const int64_t scored = engine.best(model, batch.tokens.data(), batch.view, whole.kv.data(), whole.rope.data(),
                                     wanted ? &*wanted : nullptr, head, prune, tokens.data());
  return {std::move(tokens), scored};
}

// temperature, top_k, top_p, min_p, typical_p, u
using Draw = std::tuple<double, int64_t, double, double, double, double>;

std::vector<SampleRow> sample_rows(const std::vector<Draw>& asked, int64_t rows) {
  if (rows < 1 || static_cast<int64_t>(asked.size()) != rows)
    throw std::invalid_argument("drawing needs one set of parameters for each of at least one row");
  std::vector<SampleRow> each;
  for (const auto& [temperature, top_k, top_p, min_p, typical_p, u] : asked) {
    if (!(temperature > 0)) throw std::invalid_argument("temperature must be above 0");
    each.push_back({std::max(static_cast<float>(temperature), std::numeric_limits<float>::min()), top_k, top_p, min_p, typical_p, u,
                    again(u)});
  }
  return each;
}

void check(const TopQuery& query, int64_t rows, const Linear& linear) {
  if (!linear.bias.empty()) throw std::invalid_argument("top knows no bias");
  if (query.capacity < kMostTop) throw std::invalid_argument("top needs room for at least " + std::to_string(kMostTop) + " ids a row");
  if (rows < 1) throw std::invalid_argument("top needs at least one row");
  for (int64_t r = 0; r < rows; ++r) {
    if (query.k[r] < 0 || query.k[r] > kMostTop)
      throw std::invalid_argument("k is " + std::to_string(query.k[r]) + "; it must be 0 to " + std::to_string(kMostTop));
    int64_t before = -1;
    for (int64_t i = query.offsets[r]; i < query.offsets[r + 1]; before = query.touched[i++])
      if (query.touched[i] <= before || query.touched[i] >= linear.matrix->rows)
        throw std::invalid_argument("touched ids must ascend within 0 to " + std::to_string(linear.matrix->rows - 1) +
                                    ", but " + std::to_string(query.touched[i]) + " follows " + std::to_string(before));
  }
}

}  // namespace

NB_MODULE(_native, m) {
#ifdef __GLIBC__
  // The logits of 32 rows over 262,144 tokens are 33 MB: mapped afresh for each step, their page faults alone take 4 ms.
  mallopt(M_MMAP_THRESHOLD, 256 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
  m.def("available", [] {
    std::vector<std::string> names;
    for (const Isa& isa : available()) names.emplace_back(isa.name);
    return names;
  }, "Instruction sets this machine has kernels for, best first.");
  m.def("usable_cores", &usable_cores);
  m.def("types", [] {
    std::vector<std::string> names;
    for (const auto& [name, kind] : kKinds) names.emplace_back(name);
    return names;
  });

  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro("split", &Matrix::split);

  nb::class_<Linear>(m, "Linear")
      .def("__init__", [](Linear* self, std::shared_ptr<Matrix> matrix, std::vector<float> bias, const std::string& precision) {
        if (!bias.empty() && static_cast<int64_t>(bias.size()) != matrix->rows)
          throw std::invalid_argument("a bias has one value for each row of its matrix");
        new (self) Linear{std::move(matrix), std::move(bias), precision_of(precision)};
      }, nb::arg("matrix"), nb::arg("bias"), nb::arg("precision"));

  nb::class_<Norm>(m, "Norm")
      .def("__init__", [](Norm* self, const std::string& form, std::vector<float> weight, std::vector<float> bias, float eps) {
        new (self) Norm{one_of<Norm::Form>(form, {{"none", Norm::none}, {"rms", Norm::rms}, {"layer", Norm::layer}}, "norm"),
                        std::move(weight), std::move(bias), eps};
      }, nb::arg("form") = "none", nb::arg("weight") = std::vector<float>{}, nb::arg("bias") = std::vector<float>{},
         nb::arg("eps") = 0.0f);

  nb::class_<MlpBlock>(m, "MlpBlock")
      .def("__init__", [](MlpBlock* self, Norm before, Norm after, std::optional<Linear> gate, Linear up, Linear down,
                          const std::string& act) {
        const int64_t hidden = up.matrix->cols, wide = up.matrix->rows;
        if (down.matrix->cols != wide || down.matrix->rows != hidden || (gate && (gate->matrix->rows != wide ||
            gate->matrix->cols != hidden)))
          throw std::invalid_argument("MLP: the shapes of gate, up and down do not fit");
        new (self) MlpBlock{std::move(before), std::move(after), gate.value_or(Linear{}), std::move(up), std::move(down), act_of(act)};
      }, nb::arg("before"), nb::arg("after"), nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::arg("act"))
      .def_rw("layer", &MlpBlock::layer);

  nb::class_<AttentionBlock>(m, "AttentionBlock")
      .def("__init__", [](AttentionBlock* self, Norm before, Norm after, Norm q_norm, Norm k_norm, bool norm_heads, Linear q,
                          Linear k, Linear v, Linear o, int64_t d, float scale, float softcap, int64_t window, int64_t half,
                          std::vector<float> sinks) {
        const int64_t hidden = q.matrix->cols;
        if (d < 1 || q.matrix->rows % d || k.matrix->rows % d || v.matrix->rows != k.matrix->rows ||
            (q.matrix->rows / d) % (k.matrix->rows / d) || k.matrix->cols != hidden || v.matrix->cols != hidden ||
            o.matrix->cols != q.matrix->rows || o.matrix->rows != hidden || 2 * half > d)
          throw std::invalid_argument("attention: the shapes of q, k, v and o do not fit");
        const int64_t heads = q.matrix->rows / d, kv_heads = k.matrix->rows / d;
        if (!sinks.empty() && static_cast<int64_t>(sinks.size()) != heads)
          throw std::invalid_argument("attention: " + std::to_string(sinks.size()) + " sinks for " + std::to_string(heads) +
                                      " query heads; each has one, or none has");
        new (self) AttentionBlock{std::move(before), std::move(after), std::move(q_norm), std::move(k_norm), norm_heads,
                                  std::move(q), std::move(k), std::move(v), std::move(o), heads, kv_heads, d, scale, softcap,
                                  window, half, std::move(sinks)};
      }, nb::arg("before"), nb::arg("after"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("norm_heads"), nb::arg("q"),
         nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("d"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"),
         nb::arg("half"), nb::arg("sinks") = std::vector<float>{})
      .def_rw("layer", &AttentionBlock::layer);

  nb::class_<Model>(m, "Model")
      .def("__init__", [](Model* self, std::shared_ptr<Matrix> embedding, float scale, Norm norm) {
        new (self) Model{std::move(embedding), scale, std::move(norm), {}};
      }, nb::arg("embedding"), nb::arg("scale"), nb::arg("norm"))
      .def("add", [](Model& model, const AttentionBlock& attention, const MlpBlock& mlp) {
        if (attention.q.matrix->cols != model.embedding->cols || mlp.up.matrix->cols != model.embedding->cols)
          throw std::invalid_argument("a layer's width is not that of the embedding");
        model.blocks.emplace_back(&attention, &mlp);
      }, nb::arg("attention"), nb::arg("mlp"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());

  nb::class_<Batch>(m, "Batch")
      .def(nb::new_(&make_batch), nb::arg("offsets"), nb::arg("starts"), nb::arg("positions"), nb::arg("lo"), nb::arg("hi"),
           nb::arg("slots"), nb::arg("page_table"), nb::arg("pages"), nb::arg("page_size"), nb::arg("parents"))
      .def_static("of", [](std::vector<Row> rows, int64_t page_size) { return batch_of(std::move(rows), page_size).release(); },
                  nb::arg("rows"), nb::arg("page_size"), nb::rv_policy::take_ownership);

  nb::class_<Engine>(m, "Engine")
      .def("__init__", [](Engine* self, const std::string& isa, int threads) {
        const Isa* found = isa.empty() ? find_isa(available().front().name) : find_isa(isa);
        if (!found) throw std::invalid_argument("this machine has no instruction set " + isa);
        new (self) Engine(*found, threads);
      }, nb::arg("isa") = "", nb::arg("threads") = 0)
      .def_prop_ro("isa", [](const Engine& e) { return std::string(e.isa.name); })
      .def_prop_ro("threads", [](const Engine& e) { return e.team.size(); })
      .def("trace", [](Engine& e, bool on) { e.trace.on = on; }, nb::arg("on"))
      .def("take_trace", &take_trace)
      .def("read_bandwidth", [](Engine& e, int64_t bytes, int64_t repeats) { return read_bandwidth(e, bytes, repeats); },
           nb::arg("bytes"), nb::arg("repeats") = 1, nb::call_guard<nb::gil_scoped_release>())
      .def("barrier_seconds", [](Engine& e) { return barrier_seconds(e.team); }, nb::call_guard<nb::gil_scoped_release>())
      .def("fork_seconds", [](Engine& e) { return fork_seconds(e.team); }, nb::call_guard<nb::gil_scoped_release>())
      .def("allocate", [](Engine&, const std::string& type, int64_t rows, int64_t cols, bool quantise, bool split,
                          const std::string& into) {
        return allocate(type, rows, cols, quantise, split, into);
      }, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("quantise") = false, nb::arg("split") = false,
         nb::arg("into") = "Q8_0")
      .def("allocate_codes", [](Engine&, const std::string& type, int64_t rows, int64_t cols, bool split) {
        return allocate_codes(type, rows, cols, split);
      }, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("split") = false)
      .def("fill_codes", &fill_codes, nb::arg("matrix"), nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"), nb::arg("group"),
           nb::arg("first_row"))
      .def("fill", &fill, nb::arg("matrix"), nb::arg("type"), nb::arg("rows"), nb::arg("first_row"))
      .def("lookup", &lookup, nb::arg("matrix"), nb::arg("tokens"), nb::arg("count"), nb::arg("out"))
      .def("pack", &pack, nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("quantise") = false, nb::arg("split") = false,
           nb::arg("into") = "Q8_0")
      .def("mlp", [](Engine& e, const MlpBlock& b, Address x, int64_t tokens) {
        e.run(b, reinterpret_cast<float*>(x), tokens);
      }, nb::arg("block"), nb::arg("x"), nb::arg("tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def("attention", [](Engine& e, const AttentionBlock& b, Address x, const Batch& batch, const std::string& dtype, Address k,
                           Address v, Address k_scale, Address v_scale, Address cos, Address sin,
                           bool by_position) {
        const KvView kv = kv_view(b, kv_of(dtype), k, v, k_scale, v_scale);
        nb::gil_scoped_release free;
        e.run(b, reinterpret_cast<float*>(x), batch.view, kv,
              {reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin), by_position});
      }, nb::arg("block"), nb::arg("x"), nb::arg("batch"), nb::arg("dtype"), nb::arg("k"), nb::arg("v"),
         nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("cos"), nb::arg("sin"), nb::arg("by_position"))
      .def("forward", &forward, nb::arg("model"), nb::arg("batch"), nb::arg("dtype"), nb::arg("kv"), nb::arg("rope"),
           nb::arg("by_position"), nb::arg("wanted").none(), nb::arg("out"))
      .def("best", &best, nb::arg("model"), nb::arg("batch"), nb::arg("dtype"), nb::arg("kv"), nb::arg("rope"),
           nb::arg("by_position"), nb::arg("wanted").none(), nb::arg("head"), nb::arg("prune"))
      .def("linear", [](Engine& e, const Linear& l, Address x, int64_t rows, Address out) {
        e.run(l, reinterpret_cast<const float*>(x), rows, reinterpret_cast<float*>(out), l.matrix->rows);
      }, nb::arg("linear"), nb::arg("x"), nb::arg("rows"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def("greedy", [](Engine& e, const Linear& l, Address x, int64_t rows, Address tokens) {
        check_greedy(l, rows);
        nb::gil_scoped_release free;
        return e.greedy(l, reinterpret_cast<const float*>(x), rows, reinterpret_cast<int64_t*>(tokens));
      }, nb::arg("linear"), nb::arg("x"), nb::arg("rows"), nb::arg("tokens"))
      .def("top", [](Engine& e, const Linear& l, Address x, int64_t rows, Address k, Address offsets, Address touched,
                     Address touched_scores, int64_t capacity, Address ids, Address scores, Address counts, bool prune) {
        const auto integers = [](Address a) { return reinterpret_cast<int64_t*>(a); };
        const TopQuery query{integers(k), integers(offsets), integers(touched), reinterpret_cast<float*>(touched_scores), capacity,
                             integers(ids), reinterpret_cast<float*>(scores), integers(counts), prune};
        check(query, rows, l);
        nb::gil_scoped_release free;
        return e.top(l, reinterpret_cast<const float*>(x), rows, query);
      }, nb::arg("linear"), nb::arg("x"), nb::arg("rows"), nb::arg("k"), nb::arg("offsets"), nb::arg("touched"),
         nb::arg("touched_scores"), nb::arg("capacity"), nb::arg("ids"), nb::arg("scores"), nb::arg("counts"), nb::arg("prune"))
      .def("sample", [](Engine& e, Address logits, int64_t rows, int64_t vocab, const std::vector<Draw>& asked, Address tokens) {
        if (vocab < 1) throw std::invalid_argument("rows without logits");
        const std::vector<SampleRow> each = sample_rows(asked, rows);
        nb::gil_scoped_release free;
        e.sample(reinterpret_cast<const float*>(logits), rows, vocab, each.data(), reinterpret_cast<int64_t*>(tokens));
      }, nb::arg("logits"), nb::arg("rows"), nb::arg("vocab"), nb::arg("asked"), nb::arg("tokens"))
      .def("draw_few", [](Engine&, Address ids, Address scores, int64_t rows, int64_t capacity, const std::vector<Draw>& asked,
                          bool cut, Address tokens) {
        const std::vector<SampleRow> each = sample_rows(asked, rows);
        nb::gil_scoped_release free;
        int64_t* out = reinterpret_cast<int64_t*>(tokens);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t* own = reinterpret_cast<const int64_t*>(ids) + r * capacity;
          const int64_t n = std::find(own, own + capacity, -1) - own;
          const int64_t place = draw_few({own, reinterpret_cast<const float*>(scores) + r * capacity, n, cut},
                                         each[static_cast<size_t>(r)]);
          out[r] = place < 0 ? place : own[place];
        }
      }, nb::arg("ids"), nb::arg("scores"), nb::arg("rows"), nb::arg("capacity"), nb::arg("asked"), nb::arg("cut"), nb::arg("tokens"))
      .def("argmax", [](Engine& e, const Linear& l, Address x, int64_t rows, Address tokens) {
        e.argmax(l, reinterpret_cast<const float*>(x), rows, reinterpret_cast<int64_t*>(tokens));
      }, nb::arg("linear"), nb::arg("x"), nb::arg("rows"), nb::arg("tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("prunes", [](const Engine& e) { return e.isa.kernels->head_bounds != nullptr; })
      .def("norm", [](Engine& e, const Norm& n, Address x, int64_t rows, int64_t cols, Address out) {
        e.run(n, reinterpret_cast<const float*>(x), rows, cols, reinterpret_cast<float*>(out));
      }, nb::arg("norm"), nb::arg("x"), nb::arg("rows"), nb::arg("cols"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
}
