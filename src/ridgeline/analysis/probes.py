"""Trials that tell what our native kernels take: products, attention, and what lies between them.

Each has sizes of its own, never those of a model. They run in rounds, one after the other, and the best round counts: other
programs only ever slow them.
"""
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from ridgeline.analysis.hardware import Curve
from ridgeline.bench import machine
from ridgeline.bench.machine import native_rate

# Rows of activations; up to FEW of them the weights come from memory, with more the kernels are bound by computing.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 160, 256, 512)
FEW = 48
COLS = (512, 4096)                # of a product: a row of a tile costs something beside its columns
OUTPUTS = {512: 16384, 4096: 4096}
THIN = 32                         # the least columns that a product takes
PEAKS = {"int8": "Q8_0", "bfloat16": "BF16", "float32": "F32"}
ROUNDS = 3
HEADS = tuple((d, group) for d in (64, 128, 256) for group in (1, 2, 4, 8))     # head size, query heads of a KV head
KV_HEADS = 4
PAGE = 16
CONTEXTS = (32, 128, 512, 2048)   # keys of a decoding row
START_CONTEXT = 128
DECODING = 16                     # rows
CHUNKS = ((512, 3), (512, 8), (0, 24), (0, 96), (0, 384), (0, 1024))       # prefill: cached tokens, new ones
ELEMENTS = (2, 16, 128, 1024)     # rows of WIDTH elements
WIDTH = 2048
MANY = 128
FLOATS = ("F32", "F16", "BF16")


def compute_of(kind: str, precision: str) -> str:
    """The kernels' rule: quantised weights compute in int8 or exactly, bfloat16 ones in bfloat16 or exactly."""
    if kind not in FLOATS:
        return "int8" if precision == "int8" else "float32"
    return "bfloat16" if kind == "BF16" and precision != "float32" else "float32"


def product_name(kind: str, compute: str, cols: int, split: bool = False) -> str:
    return f"product.{kind}{'.split' if split else ''}.{compute}.{cols}"


def attention_name(stage: str, dtype: str, head_dim: int, group: int) -> str:
    return f"attention.{stage}.{dtype}.{head_dim}.{group}"


class Trial(ABC):
    """Something to be measured in rounds, in turn with others: a disturbance of a second spoils one round of each, and the best
    round counts."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.best: dict[Any, float] = {}

    @abstractmethod
    def round(self) -> None:
        """Measure everything once more and `note` it."""

    @abstractmethod
    def curves(self) -> list[Curve]:
        """From the best rounds so far."""

    def note(self, what: Any, seconds: float) -> None:
        self.best[what] = min(self.best.get(what, float("inf")), seconds)

    def parts(self, call: Callable[..., object], *arguments: Any) -> dict[str, float]:
        """Seconds of each part of the second of two calls."""
        call(*arguments)
        return {part: (end - begin) / 1e9 for _, part, _, begin, end in self.traced(lambda: call(*arguments))}

    def traced(self, body: Callable[[], object]) -> list[Any]:
        self.engine.trace(True)
        try:
            body()
        finally:
            self.engine.trace(False)
        return list(self.engine.take_trace())


class Product(Trial):
    """Seconds a weight of a product, by rows, for each of COLS. cold: bytes that the caches do not hold together."""

    def __init__(self, engine: Any, kind: str, precision: str, cold: int, split: bool = False, cols: Sequence[int] = COLS):
        super().__init__(engine)
        self.kind, self.precision, self.split = kind, precision, split
        self.matrices = {each: self._matrices(each, cold) for each in cols}

    def _matrices(self, cols: int, cold: int) -> tuple[list[Any], Any]:
        """Matrices that together are cold, each small enough that its outputs stay in the cache; and one of few rows, which
        takes what every call takes beside its product."""
        first = self._linear(OUTPUTS[cols], cols)
        count = -(-cold // first.matrix.nbytes)
        return [first, *(self._linear(OUTPUTS[cols], cols) for _ in range(count - 1))], self._linear(32, cols)

    def _linear(self, rows: int, cols: int) -> Any:
        held = matrix(self.engine, self.kind, rows, cols, self.split)
        return _Held(_native().Linear(held, [], self.precision), held)

    def round(self) -> None:
        for cols, (_, few) in self.matrices.items():
            x, out = torch.rand(max(ROWS), cols), torch.empty(max(ROWS) * 32)
            for rows in ROWS:
                self.note((cols, rows), self.once(cols, rows))
                self.note((cols, rows, "beside"), min(self._time(few, x, rows, out) for _ in range(3)))

    def once(self, cols: int, rows: int) -> float:
        """Seconds a weight, what is beside the product included."""
        many = self.matrices[cols][0]
        each = many if rows <= FEW else many[:1]
        x, out = torch.rand(rows, cols), torch.empty(rows * OUTPUTS[cols])
        return sum(self._time(m, x, rows, out) for m in each) / len(each) / (OUTPUTS[cols] * cols)

    def _time(self, held: Any, x: torch.Tensor, rows: int, out: torch.Tensor) -> float:
        start = time.perf_counter()
        self.engine.linear(held.linear, x.data_ptr(), rows, out.data_ptr())
        return time.perf_counter() - start

    def curves(self) -> list[Curve]:
        compute = compute_of(self.kind, self.precision)
        return [Curve(product_name(self.kind, compute, cols, self.split), "s per weight, by rows", tuple(
            (float(rows), max(self.best[cols, rows] - self.best[cols, rows, "beside"] / (OUTPUTS[cols] * cols), 1e-15))
            for rows in ROWS)) for cols in self.matrices]


@dataclass
class _Held:
    linear: Any
    matrix: Any


class Attend(Trial):
    """Attention over a cache of one dtype. decode: seconds a key of a KV head, by context; start: seconds of a call beside
    them, which few rows show; prefill: seconds a pair of query and key of a query head, by the mean number of queries a key."""

    def __init__(self, engine: Any, kv: Cache, precision: str, d: int, group: int):
        super().__init__(engine)
        self.kv, self.d, self.group = kv, d, group
        self.block = attention_block(engine, d, group, precision)

    def round(self) -> None:
        for context in CONTEXTS:
            self._time((DECODING, context - 1, 1), 24)
        self._time((1, START_CONTEXT - 1, 1), 48)
        for start, tokens in CHUNKS:
            self._time((1, start, tokens), 2)

    def _time(self, shape: tuple[int, int, int], most: int) -> None:
        """Seconds of attention.core in a call, on average over calls on different pages."""
        rows, start, tokens = shape
        batches, x = self.kv.batches(rows, start, tokens, self.d, most), torch.rand(rows * tokens, THIN)
        events = self.traced(lambda: [self.engine.attention(
            self.block, x.data_ptr(), batch, self.kv.dtype, *self.kv.addresses, 0, 0, False) for batch, _ in batches])
        self.note(shape, sum(end - begin for _, part, _, begin, end in events if part == "attention.core") / 1e9 / len(batches))

    def curves(self) -> list[Curve]:
        decode = [(context, self.best[DECODING, context - 1, 1]) for context in CONTEXTS]
        many = Curve("", "", tuple((float(context), seconds / (DECODING * KV_HEADS * context)) for context, seconds in decode))
        start = max(0.0, self.best[1, START_CONTEXT - 1, 1] - many.at(START_CONTEXT) * KV_HEADS * START_CONTEXT)
        by_context = tuple((float(context), max(seconds - start, seconds / 2) / (DECODING * KV_HEADS * context))
                           for context, seconds in decode)
        by_queries = []
        for cached, tokens in CHUNKS:
            pairs = tokens * cached + tokens * (tokens + 1) // 2
            by_queries.append((pairs / (cached + tokens), self.best[1, cached, tokens] / (pairs * KV_HEADS * self.group)))
        names = [attention_name(stage, self.kv.dtype, self.d, self.group) for stage in ("decode", "start", "prefill")]
        return [Curve(names[0], "s per key and KV head, by context", by_context), Curve(names[1], "s", ((1.0, start),)),
                Curve(names[2], "s per pair and query head, by queries a key", tuple(sorted(by_queries)))]


class Between(Trial):
    """Seconds an element on one thread, by elements: norm (with the input of a product), residual, residual with a norm,
    activation (gated, with the input of a product), heads without and with a norm (rotation, store to the cache), input."""

    d, group = 128, 2

    def __init__(self, engine: Any, kv: Cache, precision: str):
        super().__init__(engine)
        native, self.kv = _native(), kv
        rms, none = native.Norm("rms", [1.0] * WIDTH, [], 1e-6), native.Norm()
        down, up = (native.Linear(nothing(engine, *shape), [], precision) for shape in ((WIDTH, THIN), (THIN, WIDTH)))
        self.plain = native.MlpBlock(rms, none, None, up, down, "silu")
        self.after = native.MlpBlock(none, rms, None, up, down, "silu")
        self.wide = native.MlpBlock(none, none, down, down, up, "silu")
        self.heads = [(name, attention_block(engine, self.d, self.group, precision, norm=name != "heads", half=self.d // 2))
                      for name in ("heads", "heads_norm")]

    def round(self) -> None:
        for rows in ELEMENTS:
            x, angles = torch.rand(rows, WIDTH), torch.rand(rows, self.d // 2)
            for block, before, behind in ((self.plain, "norm", "residual"), (self.after, "input", "residual_norm")):
                parts = self.parts(self.engine.mlp, block, x.data_ptr(), rows)
                self.note((before, rows), parts["mlp.norm"])
                self.note((behind, rows), parts["mlp.residual"])
                self.note(("product", rows), parts["mlp.down"])
            self.note(("up", rows), self.parts(self.engine.mlp, self.wide, x.data_ptr(), rows)["mlp.up"])
            batch, held = self.kv.batches(1, 0, rows, self.d, 1)[0]
            for name, block in self.heads:
                parts = self.parts(self.engine.attention, block, x.data_ptr(), batch, self.kv.dtype, *self.kv.addresses,
                                   angles.data_ptr(), angles.data_ptr(), False)
                self.note((name, rows), parts["attention.heads"])
            del held

    def curves(self) -> list[Curve]:
        found = []
        for name in ("norm", "residual", "residual_norm", "input", "heads", "heads_norm", "activation"):
            of_heads, points = name.startswith("heads"), []
            for rows in ELEMENTS:
                seconds = self.best.get((name, rows), 0.0)
                if name == "activation":                   # behind two products as thin as that one
                    seconds = self.best["up", rows] - 2 * self.best["product", rows]
                    if rows < MANY:                        # what every part takes hides the rest
                        continue
                elements = rows * (KV_HEADS * (self.group + 2) * self.d if of_heads else WIDTH)
                points.append((float(elements), max(seconds, 1e-8) * self.engine.threads / elements))
            found.append(Curve(f"elementwise.{name}" + (f".{self.kv.dtype}" if of_heads else ""),
                               "s per element on one thread, by elements", tuple(points)))
        return found


def peak(engine: Any, kind: str, precision: str) -> float:
    """Operations a second of a product that fits the caches and keeps every core busy."""
    return native_rate(engine, _native().Linear(matrix(engine, kind, machine.COLS, machine.COLS), [], precision))


def attention_block(engine: Any, d: int, group: int, precision: str, *, norm: bool = False, half: int = 0) -> Any:
    """Attention with KV_HEADS key-value heads whose products are next to nothing."""
    native, queries, keys = _native(), KV_HEADS * group * d, KV_HEADS * d
    q, k, v, o = (native.Linear(nothing(engine, *shape), [], precision)
                  for shape in ((queries, THIN), (keys, THIN), (keys, THIN), (THIN, queries)))
    none, head = native.Norm(), native.Norm("rms", [1.0] * d, [], 1e-6)
    over = head if norm else none
    return native.AttentionBlock(none, none, over, over, norm, q, k, v, o, d, d ** -0.5, 0.0, 0, half)


@dataclass
class Cache:
    """Pages of keys and values in one dtype, seen with any number of heads and dimensions."""

    dtype: str
    k: torch.Tensor
    v: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, dtype: str, nbytes: int) -> Cache:
        kind: torch.dtype = getattr(torch, dtype)
        count = nbytes // 2 // kind.itemsize
        k, v = (torch.ones(count, dtype=kind) for _ in range(2))
        return cls(dtype, k, v, torch.full((count // 64,), 0.01))

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        scale = self.scale.data_ptr() if self.dtype == "int8" else 0
        return self.k.data_ptr(), self.v.data_ptr(), scale, scale

    def batches(self, rows: int, start: int, tokens: int, d: int, most: int) -> list[tuple[Any, Any]]:
        """Batches of this shape on pages of their own, as many as fit, at most `most`; each with the tensors it points into."""
        each = -(-(start + tokens) // PAGE)
        there = self.k.numel() // (KV_HEADS * PAGE * d)
        count = max(1, min(most, there // (rows * each)))
        found = []
        for index in range(count):
            first = index * rows * each
            table = (torch.arange(rows * each) + first).remainder(there).view(rows, each)
            at = torch.arange(start, start + tokens).repeat(rows)                              # (rows * tokens,)
            owner = torch.arange(rows).repeat_interleave(tokens)
            slots = table[owner, at // PAGE] * PAGE + at % PAGE
            lo, hi = torch.zeros_like(at), at + 1
            batch = _native().Batch([i * tokens for i in range(rows + 1)], [start] * rows, at.data_ptr(), lo.data_ptr(),
                                    hi.data_ptr(), slots.data_ptr(), table.data_ptr(), each, PAGE, [None] * rows)
            found.append((batch, (table, at, slots, lo, hi)))
        return found


def matrix(engine: Any, kind: str, rows: int, cols: int, split: bool = False) -> Any:
    """A packed matrix of this type with arbitrary weights, none of them NaN, infinite or subnormal."""
    rng = np.random.default_rng(0)
    if kind.startswith("INT"):
        group = int(kind.partition("_G")[2])
        found = engine.allocate_codes(kind, rows, cols, split)
        codes = rng.integers(0, 16, size=(64, cols), dtype=np.uint8)
        scales, zeros = np.full((64, cols // group), 0.01, np.float32), np.zeros((64, cols // group), np.int8)
        for first in range(0, rows, 64):
            count = min(64, rows - first)
            engine.fill_codes(found, codes[:count], scales[:count], zeros[:count], group, first)
        return found
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    some = rng.integers(32, 64, size=(min(rows, 1024), cols // block * size), dtype=np.uint8)
    found = engine.allocate(kind, rows, cols, False, split)
    for first in range(0, rows, 1024):
        engine.fill(found, kind, some[:min(1024, rows - first)], first)
    return found


def nothing(engine: Any, rows: int, cols: int) -> Any:
    """A matrix of zeros: what runs over it changes nothing, however often."""
    found = engine.allocate("Q8_0", rows, cols)
    engine.fill(found, "Q8_0", np.zeros((rows, cols // 32 * 34), np.uint8), 0)
    return found


def _once(body: Callable[[], object]) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def _native() -> Any:
    from ridgeline.native import _native as module

    return module
