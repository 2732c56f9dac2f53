"""Small programs that tell what our native kernels take: products, attention, and what lies between them.

Each is run for sizes of its own, never for those of a model, and its best time counts: other programs only ever slow it.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from ridgeline.analysis.hardware import Curve

# Rows of activations; up to FEW of them the weights come from memory, with more the kernels are bound by computing.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 160, 256, 512)
FEW = 48
COLS = (512, 4096)                # of a product: a row of a tile costs something beside its columns
PEAK_ROWS, PEAK_COLS = 96, 2048
PEAKS = {"int8": "Q8_0", "bfloat16": "BF16", "float32": "F32"}
ROUNDS = 3
HEADS = tuple((d, group) for d in (64, 128, 256) for group in (1, 2, 4, 8))     # head size, query heads of a KV head
KV_HEADS = 4
PAGE = 16
CONTEXTS = (32, 128, 512, 2048)   # keys of a decoding row
DECODING = 16                     # rows
CHUNKS = ((512, 3), (512, 8), (0, 24), (0, 96), (0, 384))       # prefill: cached tokens, new ones
ELEMENTS = (2, 16, 128, 1024)     # rows of WIDTH elements
WIDTH = 2048
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


@dataclass
class Probes:
    """engine: a native engine; cold: bytes that the caches of this machine do not hold together."""

    engine: Any
    cold: int

    # Products.

    def products(self, kind: str, precision: str, split: bool = False) -> list[Curve]:
        """Seconds a weight of a product, by rows; for each of COLS."""
        return [self._product(kind, precision, cols, split) for cols in COLS]

    def _product(self, kind: str, precision: str, cols: int, split: bool) -> Curve:
        native = _native()
        per_weight = matrix(self.engine, kind, 64, cols, split).nbytes / (64 * cols)
        rows = max(4096 * 4096 // cols, int(self.cold / per_weight / cols) // 64 * 64)
        large = native.Linear(matrix(self.engine, kind, rows, cols, split), [], precision)
        small_rows = 4096 * 4096 // cols // 4
        small = native.Linear(matrix(self.engine, kind, small_rows, cols, split), [], precision)
        none = native.Linear(matrix(self.engine, kind, 32, cols, split), [], precision)
        x = torch.rand(max(ROWS), cols)
        out = torch.empty(max(ROWS) * small_rows if small_rows * max(ROWS) > rows * FEW else rows * FEW)

        def run(linear: Any, count: int) -> Callable[[], object]:
            return lambda: self.engine.linear(linear, x.data_ptr(), count, out.data_ptr())

        best = {count: float("inf") for count in ROWS}
        base = dict(best)                                # of the way to the product, and of its first rows
        for _ in range(ROUNDS):
            for count in ROWS:
                base[count] = min(base[count], *(_once(run(none, count)) for _ in range(3)))
                best[count] = min(best[count], _once(run(large if count <= FEW else small, count)))
        points = tuple((float(count), max(best[count] - base[count], 1e-9) /
                        (((rows if count <= FEW else small_rows) - 32) * cols)) for count in ROWS)
        return Curve(product_name(kind, compute_of(kind, precision), cols, split), "s per weight, by rows", points)

    def peak(self, kind: str, precision: str) -> float:
        """Operations a second of a product that fits the caches and keeps every core busy."""
        linear = _native().Linear(matrix(self.engine, kind, PEAK_COLS, PEAK_COLS), [], precision)
        x, out = torch.rand(PEAK_ROWS, PEAK_COLS), torch.empty(PEAK_ROWS, PEAK_COLS)
        best = min(_once(lambda: self.engine.linear(linear, x.data_ptr(), PEAK_ROWS, out.data_ptr())) for _ in range(8))
        return 2 * PEAK_ROWS * PEAK_COLS * PEAK_COLS / best

    # Attention.

    def attention(self, dtype: str, precision: str, heads: Sequence[tuple[int, int]] = HEADS) -> list[Curve]:
        """decode: seconds a key of a KV head, by context; prefill: seconds a pair of query and key of a query head, by the
        mean number of queries a key."""
        kv = _Cache.of(dtype, self.cold)
        return [curve for d, group in heads for curve in self._attention(kv, precision, d, group)]

    def _attention(self, kv: _Cache, precision: str, d: int, group: int) -> list[Curve]:
        block = self._attention_block(d, group, precision)
        decode = [(DECODING, context - 1, 1) for context in CONTEXTS]
        chunks = [(1, start, tokens) for start, tokens in CHUNKS]
        best: dict[tuple[int, int, int], float] = {}
        for _ in range(ROUNDS):
            for shape in (*decode, *chunks):
                most = 24 if shape in decode else 2       # calls until the first one's keys are cold again
                best[shape] = min(best.get(shape, float("inf")), self._core(block, kv, d, group, shape, most))
        by_context = tuple((float(start + 1), best[rows, start, n] / (rows * KV_HEADS * (start + 1)))
                           for rows, start, n in decode)
        by_queries = []
        for _, start, tokens in chunks:
            pairs = tokens * start + tokens * (tokens + 1) // 2
            by_queries.append((pairs / (start + tokens), best[1, start, tokens] / (pairs * KV_HEADS * group)))
        return [Curve(attention_name("decode", kv.dtype, d, group), "s per key and KV head, by context", by_context),
                Curve(attention_name("prefill", kv.dtype, d, group), "s per pair and query head, by queries a key",
                      tuple(sorted(by_queries)))]

    def _core(self, block: Any, kv: _Cache, d: int, group: int, shape: tuple[int, int, int], most: int) -> float:
        """Seconds of attention.core in a call, on average over calls on different pages."""
        rows, start, tokens = shape
        batches = kv.batches(rows, start, tokens, d, most)
        x = torch.rand(rows * tokens, 32)
        events = self.traced(lambda: [self.engine.attention(
            block, x.data_ptr(), batch, kv.dtype, *kv.addresses, 0, 0) for batch, _ in batches])
        return sum(end - begin for _, part, _, begin, end in events if part == "attention.core") / 1e9 / len(batches)

    def _attention_block(self, d: int, group: int, precision: str, hidden: int = 32, norm: bool = False, half: int = 0) -> Any:
        native = _native()

        def linear(rows: int, cols: int) -> Any:
            return native.Linear(nothing(self.engine, rows, cols), [], precision)

        queries, keys = KV_HEADS * group * d, KV_HEADS * d
        none, head = native.Norm(), native.Norm("rms", [1.0] * d, [], 1e-6)
        return native.AttentionBlock(none, none, head if norm else none, head if norm else none, norm,
                                     linear(queries, hidden), linear(keys, hidden), linear(keys, hidden),
                                     linear(hidden, queries), d, d ** -0.5, 0.0, 0, half)

    # What lies between.

    def elementwise(self, dtype: str, precision: str) -> list[Curve]:
        """Seconds an element on one thread, by elements: norm (with the input of a product), residual, residual with a norm,
        activation (gated, with the input of a product), heads without and with a norm (rotation, store to the cache), input."""
        native = _native()

        def linear(rows: int, cols: int) -> Any:
            return native.Linear(nothing(self.engine, rows, cols), [], precision)

        rms = native.Norm("rms", [1.0] * WIDTH, [], 1e-6)
        thin = linear(32, WIDTH), linear(WIDTH, 32)
        plain = native.MlpBlock(rms, native.Norm(), None, thin[0], thin[1], "silu")
        after = native.MlpBlock(native.Norm(), rms, None, thin[0], thin[1], "silu")
        wide = native.MlpBlock(native.Norm(), native.Norm(), thin[1], thin[1], thin[0], "silu")
        d, group = 128, 2
        blocks = [self._attention_block(d, group, precision, norm=norm, half=d // 2) for norm in (False, True)]
        kv = _Cache.of(dtype, self.cold // 4)
        best: dict[tuple[str, int], float] = {}

        def note(name: str, rows: int, seconds: float) -> None:
            best[name, rows] = min(best.get((name, rows), float("inf")), seconds)

        for _ in range(ROUNDS):
            for rows in ELEMENTS:
                x, angles = torch.rand(rows, WIDTH), torch.rand(rows, d // 2)
                for block, before, behind in ((plain, "norm", "residual"), (after, "input", "residual_norm")):
                    parts = self.parts(self.engine.mlp, block, x.data_ptr(), rows)
                    note(before, rows, parts["mlp.norm"])
                    note(behind, rows, parts["mlp.residual"])
                    note("product", rows, parts["mlp.down"])
                note("up", rows, self.parts(self.engine.mlp, wide, x.data_ptr(), rows)["mlp.up"])
                batch, held = kv.batches(1, 0, rows, d, 1)[0]
                for name, block in (("heads", blocks[0]), ("heads_norm", blocks[1])):
                    parts = self.parts(self.engine.attention, block, x.data_ptr(), batch, kv.dtype, *kv.addresses,
                                       angles.data_ptr(), angles.data_ptr())
                    note(name, rows, parts["attention.heads"])
                del held
        curves = []
        for name in ("norm", "residual", "residual_norm", "input", "heads", "heads_norm", "activation"):
            of_heads, points = name.startswith("heads"), []
            for rows in ELEMENTS:
                seconds = best["up", rows] - 2 * best["product", rows] if name == "activation" else best[name, rows]
                elements = rows * (KV_HEADS * (group + 2) * d if of_heads else WIDTH)
                points.append((float(elements), max(seconds, 1e-8) * self.engine.threads / elements))
            curves.append(Curve(f"elementwise.{name}" + (f".{dtype}" if of_heads else ""),
                                "s per element on one thread, by elements", tuple(points)))
        return curves

    # Timing.

    def traced(self, body: Callable[[], object]) -> list[Any]:
        self.engine.trace(True)
        try:
            body()
        finally:
            self.engine.trace(False)
        return list(self.engine.take_trace())

    def parts(self, call: Callable[..., object], *arguments: Any) -> dict[str, float]:
        """Seconds of each part of the second of two calls."""
        call(*arguments)
        return {part: (end - begin) / 1e9 for _, part, _, begin, end in self.traced(lambda: call(*arguments))}


@dataclass
class _Cache:
    """Pages of keys and values in one dtype, seen with any number of heads and dimensions."""

    dtype: str
    k: torch.Tensor
    v: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, dtype: str, nbytes: int) -> _Cache:
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
