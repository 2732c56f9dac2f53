"""The shape of a model as its cost needs it: matrices with their stored types, heads, windows. Plain data, nothing loaded.

Built from a model by `ridgeline.analysis.read`; "what if the model had ..." is `dataclasses.replace`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.errors import ConfigError

# Bits of a weight, scales included, of types that a model can be planned in; loaded models know the bytes of each matrix.
WEIGHT_BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "fp8": 8.0, "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0,
    "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625, "iq4_nl": 4.5, "iq4_xs": 4.25}
# Bytes of an element of the KV cache; int8 has a scale of 4 bytes for each row of a head besides.
KV_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
KV_SCALE_BYTES = {"int8": 4}
STATE_ITEMSIZE = 4                 # of recurrent state


@dataclass(frozen=True)
class Matrix:
    """The weight of y = W x: `rows` outputs, `cols` inputs; kind: its stored type; nbytes: as it lies in memory."""

    rows: int
    cols: int
    kind: str
    nbytes: int

    @classmethod
    def of(cls, rows: int, cols: int, kind: str) -> Matrix:
        """raises ConfigError for a type whose size is not known."""
        if kind not in WEIGHT_BITS:
            raise ConfigError(f"weights of type {kind!r} cannot be planned; known: {', '.join(WEIGHT_BITS)}")
        return cls(rows, cols, kind, math.ceil(rows * cols * WEIGHT_BITS[kind] / 8))

    @property
    def parameters(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Attention:
    """Softmax attention. q has heads * head_dim rows, twice that many where it yields a gate for the output as well.

    norm: of queries and keys, "" | "head" | "all"; rotated: dimensions of a head that RoPE turns; value_dim: of v's heads.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    norm: str = ""
    rotated: int = 0
    gated: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.q, self.k, self.v, self.o

    @property
    def kv_width(self) -> int:
        """Elements of keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes(self, dtype: str) -> int:
        """Of one token's keys and values, scales included."""
        return self.kv_width * KV_ITEMSIZE[dtype] + 2 * self.kv_heads * KV_SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True)
class Mlp:
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    up: Matrix
    down: Matrix
    gate: Matrix | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class Recurrent:
    """Gated DeltaNet: projections, a causal convolution of `width` taps over [q | k | v], a state of key_dim x value_dim for
    each value head, kept in fp32 as the convolution's last inputs are."""

    qkv: Matrix
    z: Matrix
    b: Matrix
    a: Matrix
    out: Matrix
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.z, self.b, self.a, self.out

    @property
    def conv_state(self) -> int:
        """Elements."""
        return self.qkv.rows * (self.width - 1)

    @property
    def core_state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def state_bytes(self) -> int:
        """Of one sequence."""
        return STATE_ITEMSIZE * (self.conv_state + self.core_state)


@dataclass(frozen=True)
class Mla:
    """Latent attention (arXiv 2405.04434): the cache keeps one latent of kv_b.cols elements and one rotated key of `rope`
    elements a token for all heads. q_a: the queries' own latent, or None; kv_b expands a latent to `nope` + value_dim elements
    a head. For planning: no layer of the engine computes it yet."""

    q_b: Matrix
    kv_a: Matrix
    kv_b: Matrix
    o: Matrix
    heads: int
    nope: int
    rope: int
    value_dim: int
    q_a: Matrix | None = None
    window: int | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        rest = (self.q_b, self.kv_a, self.kv_b, self.o)
        return rest if self.q_a is None else (self.q_a, *rest)

    @property
    def rank(self) -> int:
        return self.kv_b.cols

    @property
    def kv_width(self) -> int:
        return self.rank + self.rope

    def kv_bytes(self, dtype: str) -> int:
        return self.kv_width * KV_ITEMSIZE[dtype] + KV_SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True)
class Moe:
    """`active` of `experts` gated MLPs for each token, chosen by a router, and perhaps shared ones that every token passes. up,
    down, gate: of one expert. For planning: no layer of the engine computes it yet."""

    router: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    experts: int
    active: int
    shared_gate: Matrix | None = None
    shared_up: Matrix | None = None
    shared_down: Matrix | None = None

    @property
    def expert(self) -> tuple[Matrix, ...]:
        return self.gate, self.up, self.down

    @property
    def shared(self) -> tuple[Matrix, ...]:
        return tuple(m for m in (self.shared_gate, self.shared_up, self.shared_down) if m is not None)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.router, *self.expert * self.experts, *self.shared)

    def touched(self, tokens: int) -> float:
        """Experts that some of these tokens choose, on average, where each choice is as likely as any other."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


Mixer = Attention | Recurrent | Mla
Feed = Mlp | Moe


@dataclass(frozen=True)
class Part:
    """A residual step x + after(inner(before(x))); before, after: whether there is such a norm; native: whether our fused
    kernels run it (False: torch, one kernel an operation)."""

    inner: Mixer | Feed
    before: bool = True
    after: bool = False
    native: bool = True


@dataclass(frozen=True)
class Layer:
    mix: Part
    feed: Part


@dataclass(frozen=True)
class Spec:
    """A model. kv_dtype, precision: of the cache and of the activations in products; stream: bytes of an element of the
    residual stream; kernels: "native" (ours, on a CPU), "fused" (one kernel a component, as GPUs have them), "torch"; parallel:
    devices that share each layer, the spec being one's share; head_split: greedy passes of few rows read the head by halves.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    embed: Matrix
    head: Matrix
    tied: bool
    kv_dtype: str = "bfloat16"
    precision: str = "int8"
    stream: int = 4
    kernels: str = "native"
    other_parameters: int = 0                     # norms, biases and the like, kept at `stream` bytes each
    max_context: int | None = None
    parallel: int = 1
    head_split: bool = False

    @property
    def matrices(self) -> list[Matrix]:
        """Of layers, in order."""
        return [m for layer in self.layers for part in (layer.mix, layer.feed) for m in part.inner.matrices]

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory."""
        ends = self.embed.nbytes + (0 if self.tied else self.head.nbytes)
        return sum(m.nbytes for m in self.matrices) + ends + self.other_parameters * self.stream

    @property
    def parameters(self) -> int:
        ends = self.embed.parameters + (0 if self.tied else self.head.parameters)
        return sum(m.parameters for m in self.matrices) + ends + self.other_parameters

    def attention_layers(self) -> list[Attention]:
        return [layer.mix.inner for layer in self.layers if isinstance(layer.mix.inner, Attention)]

    def kv_bytes_per_token(self) -> int:
        """Of one sequence, all layers."""
        mixers = (layer.mix.inner for layer in self.layers)
        return sum(mixer.kv_bytes(self.kv_dtype) for mixer in mixers if isinstance(mixer, (Attention, Mla)))

    def state_bytes(self) -> int:
        """Of the recurrent state of one sequence."""
        return sum(layer.mix.inner.state_bytes() for layer in self.layers if isinstance(layer.mix.inner, Recurrent))
