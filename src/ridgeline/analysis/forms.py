"""Closed forms: operations, bytes and intensity of a transformer's parts, and where one bound gives way to another.

T tokens of a step (prefill B S, decode B), d hidden size, f MLP width, H heads, K KV heads, h head size, S new and P past
tokens of a sequence, N parameters, L context; w, a, c bytes of a weight, an activation and a cached element. Operations are two
a multiply-add. The names that begin with `chapter_` count as textbooks do: all in 16 bits, each tensor once.
"""
from __future__ import annotations

from typing import NamedTuple

from ridgeline.memory import TRAINING_BYTES


class Form(NamedTuple):
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


# Parts of a layer: the least bytes, inputs read and outputs written once.

def linear(T: int, i: int, o: int, *, w: float = 2, a: float = 2) -> Form:
    """i inputs, o outputs. Few tokens: intensity 2 T / w."""
    return Form(2 * T * i * o, w * i * o + a * T * (i + o))


def ffn(T: int, d: int, f: int, *, w: float = 2, a: float = 2) -> Form:
    """Two matrices; the intermediate is written and read."""
    return Form(4 * T * d * f, 2 * w * d * f + a * T * (2 * d + 2 * f))


def glu(T: int, d: int, f: int, *, w: float = 2, a: float = 2, fused: bool = True) -> Form:
    """Three matrices, two of them "up". fused: gate, up and activation are one kernel; else each writes what the next reads."""
    return Form(6 * T * d * f, 3 * w * d * f + a * T * (2 * d + 2 * f if fused else 3 * d + 6 * f))


def activation_operations(T: int, f: int) -> int:
    """Of silu(gate) * up, about; the other forms leave it out, as they do softmax."""
    return 5 * T * f


def attention_projections(T: int, d: int, H: int, K: int, h: int, *, w: float = 2, a: float = 2) -> Form:
    """q, k, v and output projection; with H h = d and K = H it is 8 T d^2. q, k and v are one kernel."""
    return Form(4 * T * d * h * (H + K), 2 * w * d * h * (H + K) + a * T * (2 * d + 2 * h * (H + K)))


def pairs(S: int, P: int = 0) -> int:
    """(query, key) pairs of S causal queries behind P tokens."""
    return S * P + S * (S + 1) // 2


def attention_core(S: int, P: int, H: int, K: int, h: int, *, B: int = 1, a: float = 2, c: float = 2) -> Form:
    """Scores and sums of B sequences; each key and value of the K heads is read once, whatever H."""
    return Form(4 * B * H * h * pairs(S, P), B * (2 * a * S * H * h + 2 * c * (P + S) * K * h))


def softmax_operations(S: int, P: int, H: int, B: int = 1) -> int:
    return 5 * B * H * pairs(S, P)


def core_limit(H: int, K: int, *, S: int = 1, decode: bool, c: float = 2) -> float:
    """Intensity of `attention_core`, long sequences, 16-bit activations: prefill g S / (2 (g + 1)) with c = 2, decode
    2 g q / c for q = S rows of a sequence; g = H / K. Independent of batch and context."""
    g = H / K
    return 2 * g * S / c if decode else g * S / (2 * g + c)


def lm_head(B: int, d: int, V: int) -> int:
    """Operations: last rows only."""
    return 2 * B * d * V


def kv_write(T: int, K: int, h: int, c: float = 2) -> float:
    """Bytes: keys and values, hence the factor 2."""
    return 2 * c * T * K * h


def rms_norm(T: int, d: int, a: float = 2) -> Form:
    return Form(4 * T * d, 2 * a * T * d)


def experts_touched(E: int, k: int, T: int) -> float:
    """Experts of a mixture whose weights a step of T tokens reads, where each choice of k is as likely as any other."""
    return E * (1 - (1 - k / E) ** T)


def delta_rule(T: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Operations of a gated linear attention: the same for every token, however long what came before."""
    return 6 * T * heads * key_dim * value_dim


def all_reduce(devices: int, payload: float) -> float:
    """Bytes that each device of a ring sends."""
    return 2 * (devices - 1) / devices * payload


# The same as textbooks count them.

def chapter_swiglu(B: int, T: int, D: int, F: int) -> Form:
    return Form(6 * B * D * F * T, 4 * B * D * T + 6 * D * F + 4 * B * F * T)


def chapter_ffn(B: int, T: int, D: int, F: int) -> Form:
    return Form(4 * B * D * F * T, 4 * B * D * T + 4 * D * F + 2 * B * F * T)


def chapter_projections(B: int, T: int, D: int, D_kv: int | None = None, D_q: int | None = None) -> Form:
    """D_kv: K h of grouped heads, D_q: H h; None: D. Multi-head: 8 B T D^2 / (4 B D T + 8 D^2)."""
    queries, keys = D if D_q is None else D_q, D if D_kv is None else D_kv
    return Form(4 * B * T * D * (queries + keys), 4 * B * D * T + 4 * D * (queries + keys))


def chapter_core(B: int, T: int, S: int, D: int, D_kv: int | None = None) -> Form:
    """T queries over a context of S, all pairs. Multi-head: 4 B T S D / (4 B D T + 4 B D S) = T S / (T + S)."""
    return Form(4 * B * T * S * D, 4 * B * D * T + 4 * B * S * (D if D_kv is None else D_kv))


def chapter_attention(B: int, T: int, S: int, D: int, D_kv: int | None = None) -> Form:
    """Projections and core."""
    one, two = chapter_projections(B, T, D, D_kv), chapter_core(B, T, S, D, D_kv)
    return Form(one.flops + two.flops, one.bytes + two.bytes)


def chapter_swiglu_limit(D: int, F: int) -> float:
    """Intensity as B T grows; while D, F >> B T it is B T."""
    return 3 * D * F / (2 * D + 2 * F)


def chapter_core_limit(H: int, K: int, S: int, *, decode: bool) -> float:
    """Prefill (T = S): S / (1 + K / H), multi-head S / 2. Decode, S >> H / K: H / K, multi-head 1."""
    return H / K if decode else S / (1 + K / H)


def per_token(d: int, n: int) -> int:
    """Operations of one token in one layer with f = 4 d and a plain MLP, behind n tokens: projections, MLP, core."""
    return 24 * d * d + 4 * n * d


# Where one bound gives way to another.

def ridge(peak: float, bandwidth: float) -> float:
    """Operations a byte from which on computing takes longer than reading."""
    return peak / bandwidth


def turning_tokens(ridge: float, w: float) -> float:
    """Tokens of a step from which on a linear layer is bound by computing."""
    return ridge * w / 2


def layer_parameters(d: int, f: int, H: int, K: int, h: int) -> int:
    """Of the matrices of one layer with a gated MLP."""
    return 2 * d * h * (H + K) + 3 * d * f


def core_overtakes(n: float, H: int, h: int) -> float:
    """Context at which a token's core has as many operations as the n parameters of its layer's matrices."""
    return n / (2 * H * h)


def prefill_overtakes(n: float, H: int, h: int) -> float:
    """Prompt length at which the cores of a causal prefill have as many operations as its layer's matrices."""
    return n / (H * h)


def kv_overtakes(n: float, K: int, h: int, *, B: int = 1, w: float = 2, c: float = 2) -> float:
    """Context at which B sequences' keys and values are as many bytes as the n parameters of their layer."""
    return w * n / (2 * B * K * h * c)


def kv_per_token(layers: int, K: int, h: int, c: float = 2) -> float:
    """Bytes of one token's keys and values, all layers."""
    return 2 * layers * K * h * c


def step_seconds(B: int, L: int, *, N: float, w: float, kappa: float, bandwidth: float, peak: float,
                 overhead: float = 0) -> float:
    """Of a decoding step: weights read or multiplied, whichever takes longer, keys and values read, and what is constant."""
    return max(w * N / bandwidth, 2 * B * N / peak) + B * L * kappa / bandwidth + overhead


class BatchLimits(NamedTuple):
    """Sequences: compute, where matrices turn compute-bound; kv, where keys and values are as many bytes as the weights;
    memory, where it is full."""

    compute: float
    kv: float
    memory: float

    @property
    def stops(self) -> float:
        """Where batching stops helping: the first of them."""
        return min(self)


def batch_limits(L: int, *, N: float, w: float, kappa: float, bandwidth: float, peak: float, memory: float) -> BatchLimits:
    return BatchLimits(peak * w / (2 * bandwidth), w * N / (L * kappa), (memory - w * N) / (L * kappa))


# Gains.

def weights_gain(share: float, w: float, narrower: float) -> float:
    """Of a step that is bound by reading, of which `share` is weights, from w to fewer bytes a weight."""
    return 1 / (1 - share + share * narrower / w)


def tokens_per_pass(acceptance: float, k: int) -> float:
    """Tokens that a verification of k drafts keeps, each accepted with the same probability."""
    return k + 1.0 if acceptance == 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)


def speculation_gain(acceptance: float, k: int, step: float, verify: float, draft: float = 0) -> float:
    """step, verify, draft: seconds of a pass over one row, over k + 1, and of one of the drafter."""
    return tokens_per_pass(acceptance, k) * step / (verify + k * draft)


# Memory.

def training_bytes(N: int, activations: float = 0) -> float:
    """Weights, gradients and optimizer states of AdamW in mixed precision, 16 bytes a parameter, and what the backward pass
    keeps."""
    return N * sum(TRAINING_BYTES.values()) + activations


def inference_bytes(N: float, w: float, kappa: float, tokens: int) -> float:
    """Weights, and keys and values of all tokens of all sequences."""
    return w * N + kappa * tokens
