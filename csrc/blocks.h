// What a decoder layer does: an attention block and an MLP block, residual connections and norms included; and whole passes.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "memory.h"
#include "parallel.h"
#include "sample.h"
#include "trace.h"

namespace ridgeline {

// A packed matrix and its memory.
struct Matrix {
  Kind kind;
  int64_t rows, cols;
  Buffer quants, scales;
  Buffer low;                   // of a split head: quants then holds the high nibbles, low the low ones
  bool split() const { return low.size() > 0; }
  Weights view() const {
    return {split() ? Kind::q8_split : kind, rows, cols, quants.data(), scales.data(), low.data()};
  }
  SplitHead planes() const { return {rows, cols, quants.data(), low.data(), scales.data()}; }
  size_t bytes() const { return quants.size() + scales.size() + low.size(); }
};

enum class Precision : int32_t { i8, bf16, f32 };   // of the activations that enter a matrix product

struct Linear {
  std::shared_ptr<Matrix> matrix;
  std::vector<float> bias;      // empty = none
  Precision precision;
};

// What the activations of a product are brought to: float kinds take no int8 activations.
Precision precision_of(const Linear& linear);

struct Norm {
  enum Form : int32_t { none, rms, layer } form = none;
  std::vector<float> weight, bias;      // weight as it multiplies, 1 + w where a checkpoint keeps w
  float eps = 0;
};

// cos and sin of a rotation, `half` values a row: a row for each position from 0 on, or for each token of the batch.
struct Rope {
  const float* cos;
  const float* sin;
  bool by_position;
};

// Rows of a forward pass, as the layers need them. All pointers stay valid during a call.
struct BatchView {
  int64_t tokens, rows;
  const int64_t* offsets;       // rows + 1
  const int64_t* starts;        // cache position of each row's first token
  const int64_t* positions;     // tokens; RoPE positions
  const int64_t* lo;
  const int64_t* hi;
  const int64_t* slots;         // tokens; page * page_size + offset
  const int64_t* page_table;    // rows x pages
  int64_t pages, page_size;
  const uint64_t* const* ancestors;   // rows; null for a chain
};

struct KvView {
  KvType type;
  void* k;                      // (pages, heads, page_size, d)
  void* v;
  int64_t heads, d, dv;
  float* k_scale;               // (pages, heads, page_size); of int8 alone
  float* v_scale;
};

struct MlpBlock {
  Norm before, after;
  Linear gate, up, down;        // gate.matrix null: down(act(up(x)))
  Act act;
  int64_t layer = -1;           // as traces name it
};

struct AttentionBlock {
  Norm before, after, q_norm, k_norm;
  bool norm_heads = false;      // q and k norms over each head rather than over the whole projection
  Linear q, k, v, o;
  int64_t heads, kv_heads, d;
  float scale, softcap;
  int64_t window;               // 0 = none
  int64_t half;                 // rotated pairs of a head; 0 = no rotation
  std::vector<float> sinks;     // a logit for each query head that joins its softmax and is dropped; empty = none
  int64_t layer = -1;           // as traces name it
};

constexpr int64_t kMostTop = 80;        // k of a TopQuery at most

// The k largest scores of each row, and the scores of some output rows that are no candidates ("touched").
struct TopQuery {
  const int64_t* k;             // rows; 0 to kMostTop; 0: only the touched ones are wanted
  const int64_t* offsets;       // rows + 1, into touched
  const int64_t* touched;       // output rows, ascending within a row
  float* touched_scores;
  int64_t capacity;             // of ids and scores for one row, at least kMostTop
  int64_t* ids;                 // rows x capacity: all whose score is at least the k-th largest, ascending
  float* scores;
  int64_t* counts;              // rows; kBroken: a score is NaN or infinite, kTied: more than `capacity` tie with the k-th
  bool prune;                   // read the low plane of a split matrix only where it can matter
  static constexpr int64_t kBroken = -1, kTied = -2;
};

// A model but for its head: embedding, decoder layers in their order, final norm. The blocks belong to the caller.
struct Model {
  std::shared_ptr<Matrix> embedding;
  float scale;                  // of embedded rows
  Norm norm;
  std::vector<std::pair<const AttentionBlock*, const MlpBlock*>> blocks;
};

// The threads, the instruction set and the work space of one model.
class Engine {
 public:
  Engine(const Isa& isa, int threads) : isa(isa), team(threads) {}

  // x (tokens x hidden, fp32) += block(x). then: adds what follows to a thread's Ahead.
  using Then = std::function<void(int thread)>;
  void run(const MlpBlock& block, float* x, int64_t tokens, const Then& then = {});
  void run(const AttentionBlock& block, float* x, const BatchView& batch, const KvView& kv, const Rope& rope,
           const Then& then = {});
  // A whole pass from token ids to out: of the batch's tokens the rows `wanted`, null = all, behind the final norm, `hidden`
  // values each. kv, rope: one for each layer.
  void forward(const Model& model, const int64_t* ids, const BatchView& batch, const KvView* kv, const Rope* rope,
               const std::vector<int64_t>* wanted, float* out);
  // The same, and the head after it: tokens[i] = argmax over the head of wanted row i, as argmax() or, if `prune`, greedy() finds
  // it. Returns how many of the head's rows were scored from all their bytes.
  int64_t best(const Model& model, const int64_t* ids, const BatchView& batch, const KvView* kv, const Rope* rope,
               const std::vector<int64_t>* wanted, const Linear& head, bool prune, int64_t* tokens);
  // out (count x columns) = rows `ids` of a matrix, dequantised.
  void lookup(const Matrix& matrix, const int64_t* ids, int64_t count, float* out);
  // out (rows x matrix rows, leading dimension ld) = x . W
  void run(const Linear& linear, const float* x, int64_t rows, float* out, int64_t ld);
  void run(const Norm& norm, const float* x, int64_t rows, int64_t n, float* out);
  // tokens[r] = argmax over the rows of x[r] . W, the lowest on ties; -1 where a score is not finite. Exactly what the whole
  // product gives, reading the low nibbles only where the high ones leave a doubt. Returns how many output rows were scored
  // from both planes, parts of rows added up. The matrix must be split.
  int64_t greedy(const Linear& linear, const float* x, int64_t rows, int64_t* tokens);
  // The same for any matrix, from the whole product, which stays in the cache strip by strip; -1 where a score is not finite.
  void argmax(const Linear& linear, const float* x, int64_t rows, int64_t* tokens);
  // The best of each row, as `query` asks. Returns how many output rows were scored from both planes; all, where the matrix
  // is not split, with more than kHeadRows rows, or where `query` says so.
  int64_t top(const Linear& linear, const float* x, int64_t rows, const TopQuery& query);
  // tokens[r] drawn from row r of the logits (rows x vocab) as asked[r] says; kNothing or kInfinite where it cannot be.
  void sample(const float* logits, int64_t rows, int64_t vocab, const SampleRow* asked, int64_t* tokens);

  const Isa isa;
  Team team;
  Trace trace;

 private:
  struct Input {                // activations in the forms that the products need
    float* x = nullptr;
    int8_t* q = nullptr;
    float* scale = nullptr;
    int32_t* sum = nullptr;
    uint16_t* half = nullptr;
    int64_t rows = 0, cols = 0, stride = 0;
  };
  Input input(int slot, int64_t rows, int64_t cols);
  void prepare(const Input& in, Precision precision, int64_t row, int64_t first_block, int64_t last_block) const;
  void convert(const Input& in, Precision precision, const float* x, int64_t row, int64_t first_block, int64_t last_block) const;
  void normalise_rows(const Norm& norm, const float* x, const Input& in, int mask, int thread);
  void take(const Input& in, const float* x, Precision precision, int thread) const;
  void multiply(const Linear& linear, const Input& in, int64_t first, int64_t last, float* out, int64_t ld) const;
  void normalise(const Norm& norm, const float* x, int64_t n, float* out) const;
  void finish(const Norm& after, const float* y, int64_t n, float* x) const;
  // Give a thread's Ahead what it reads first in a product of some rows, in those of q, k and v, or in attention.
  void expect(int thread, const Linear& linear, int64_t rows);
  void expect(int thread, const AttentionBlock& block, int64_t rows);
  void expect(int thread, const AttentionBlock& block, const BatchView& batch, const KvView& kv);
  // Between a pass of few rows and its head, and from there to the next pass, the caller is away: workers fetch the head's
  // first weights and then those of the first layers. Both are as the last pass and head had them.
  void note_head(const Weights& w, int64_t rows, int parts);   // it is read from that many places on
  void note_pass(const Model& model, int64_t rows);
  void expect(int thread, const std::vector<Span>& noted);
  void attend(const AttentionBlock& block, const BatchView& batch, const KvView& kv, float* qkv, int64_t ld, float* out,
              int thread);

  int64_t top_whole(const Linear& linear, const Input& in, const float* x, const TopQuery& query);
  int64_t top_pruned(const Linear& linear, const Input& in, const float* x, const TopQuery& query);
  // Calls sink(thread, tile, scores), scores being rows x kTile exact ones that it may overwrite, once for each tile with a row
  // that may be among the k best of those that are not touched, or with a touched one. broken[r] becomes true where a score
  // may be not finite. Of `query` only k, offsets and touched are read. Returns what greedy() does.
  using TileSink = std::function<void(int, int64_t, float*)>;
  int64_t prune(const Linear& linear, const Input& in, const float* x, const TopQuery& query, bool* broken, const TileSink& sink);
  int64_t touched_alone(const Linear& linear, const Input& in, const float* x, const TopQuery& query);

  Buffer inputs_[2], wide_[3], normal_, scratch_, parts_, tiles_, hidden_, wanted_;
  std::vector<Span> head_start_, pass_start_;   // pointers that are asked for, never read: a matrix may be gone
};

}  // namespace ridgeline
