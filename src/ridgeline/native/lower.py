"""Replace the layers of a model by native ones, straight from its checkpoint: the weights never exist as torch tensors.

Walks the model once. A builder that cannot take a layer declines with a reason; that layer stays torch and the report says
so. Nothing falls back silently.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ridgeline.errors import ConfigError
from ridgeline.layers.attention import Attention
from ridgeline.layers.block import ResidualBlock
from ridgeline.layers.mlp import MLP, GatedMLP
from ridgeline.layers.norm import RMSNorm
from ridgeline.models.base import Backbone, CausalLM
from ridgeline.native import _native, codes
from ridgeline.native.head import NativeHead, NativeTopHead
from ridgeline.native.layers import (
    NativeAttention,
    NativeBlock,
    NativeEmbedding,
    NativeMLP,
    NativeNorm,
    NativePart,
)
from ridgeline.native.whole import NativeWhole
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.dummy import dummy_tensor
from ridgeline.weights.load import check_weights, packed_source, read_source
from ridgeline.weights.mapping import From

_log = logging.getLogger(__name__)

PAGE_MULTIPLE = 8                 # keys that a kernel reads in one go, all of one page
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = {"int8": "Q8_0", "int4": "Q4_0"}       # what float weights become
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


ROWS_AT_ONCE = 16384
MOST_SPLIT_COLUMNS = 16384         # kHeadBlocks in csrc/kernels/head.h


class Declined(Exception):
    """Why a layer stays with torch."""


@dataclass(frozen=True)
class Lowered:
    """One layer of the report: its name, the types and packed bytes of its matrices, or why it was not lowered."""

    name: str
    kinds: tuple[str, ...] = ()
    nbytes: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class Stored:
    """A packed matrix: its type and bytes; split: into planes of high and low nibbles, as heads that greedy decoding prunes."""

    kind: str
    nbytes: int
    split: bool = False


@dataclass
class Report:
    """What runs natively, with which instruction set and threads, and what does not and why."""

    isa: str
    threads: int
    layers: list[Lowered] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)      # of the checkpoint, read here
    parameters: int = 0                                 # in native matrices
    matrices: dict[str, Stored] = field(default_factory=dict)   # by the name of the parameter they stand for
    notes: list[str] = field(default_factory=list)      # matrices that take more memory and time than the file's form would

    @property
    def declined(self) -> list[Lowered]:
        return [layer for layer in self.layers if layer.reason is not None]

    @property
    def complete(self) -> bool:
        return not self.declined

    @property
    def nbytes(self) -> int:
        """Of native matrices."""
        return sum(layer.nbytes for layer in self.layers)

    def reasons(self, most: int = 5) -> str:
        """The reasons of declined layers, each with its layers: "no native X (a, b and 3 more); ..."."""
        names: dict[str, list[str]] = {}
        for layer in self.declined:
            names.setdefault(str(layer.reason), []).append(layer.name)
        parts = []
        for reason, which in names.items():
            parts.append(f"{reason} ({_some(which, most)})")
        return "; ".join(parts)


def _layer_of(name: str) -> int:
    """3 of "model.layers.3.mlp"; -1 if a layer is not one of a row."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def lower(model: CausalLM, checkpoint: Checkpoint, *, precision: str = "int8", quantization: str | None = None,
          threads: int = 0, isa: str = "", strict: bool = False, page_size: int = 16, kv_dtype: torch.dtype = torch.bfloat16,
          progress: Callable[[int, int], None] | None = None) -> Report:
    """Lower a model that was built on the meta device; what is left has still to be loaded by load_weights.

    precision: dtype of activations in matrix products, int8, bfloat16 or float32; quantization: "int8" or "int4" quantises
    weights that are not yet, with one scale per 32 columns (int4: embeddings and head to 8 bits); strict: a layer that is
    declined is a ConfigError; page_size, kv_dtype: of the cache that the model will run on. Declined layers are logged as a
    warning. raises ConfigError for an instruction set that the machine lacks, ModelError and CorruptFile where the checkpoint
    does not fit the model.
    """
    check_weights(model, checkpoint)
    try:
        engine = _native.Engine(isa, threads)
    except ValueError as error:
        raise ConfigError(f"{error}; available: {', '.join(_native.available())}") from error
    if engine.isa == "scalar":
        _log.warning("%s: this CPU has neither AVX2 nor AVX-512 with VNNI, or they were turned off: the plain kernels are "
                     "correct and many times slower", checkpoint.path)
    builder = _Builder(model, checkpoint, engine, precision, quantization, _cache_reason(page_size, kv_dtype), progress)
    report = Report(engine.isa, engine.threads)
    builder.walk(report)
    if report.declined:
        told = f"{len(report.declined)} of {len(report.layers)} layers are not native: {report.reasons()}"
        if strict:
            raise ConfigError(f"strict_native: {told}")
        _log.warning("%s: %s", checkpoint.path, told)
    for note in report.notes:
        _log.warning("%s: %s", checkpoint.path, note)
    return report


def survey(model: CausalLM, checkpoint: Checkpoint, *, quantization: str | None = None, threads: int = 0,
           page_size: int = 16, kv_dtype: torch.dtype = torch.bfloat16) -> Report:
    """What `lower` would report, from the headers alone; the model stays as it is. Bytes are those of the file's blocks:
    packed, scales take a few percent more."""
    report = Report(_native.available()[0], threads or _native.usable_cores())
    _Builder(model, checkpoint, None, "int8", quantization, _cache_reason(page_size, kv_dtype), None).walk(report)
    return report


def _cache_reason(page_size: int, kv_dtype: torch.dtype) -> str | None:
    """Why no attention layer can run on such a cache, or None."""
    if page_size % PAGE_MULTIPLE:
        return f"block_size is {page_size}; native attention needs a multiple of {PAGE_MULTIPLE}"
    if kv_dtype not in KV_DTYPES:
        return f"no native kernel for a KV cache of {str(kv_dtype).removeprefix('torch.')}"
    return None


class _Builder:
    """engine None: read headers only and leave the model as it is."""

    def __init__(self, model: CausalLM, checkpoint: Checkpoint, engine: _native.Engine | None, precision: str,
                 quantization: str | None, cache_reason: str | None, progress: Callable[[int, int], None] | None):
        self.model, self.checkpoint, self.engine = model, checkpoint, engine
        self.precision, self.quantization, self.progress = precision, quantization, progress
        self.cache_reason = cache_reason
        self.sources: Mapping[str, From] = model.sources()
        self.held, self.taken = set(checkpoint.names()), set[str]()
        self.total = sum(p.numel() for p in model.parameters())
        self.done = 0            # parameters
        self.nbytes = 0          # of packed matrices
        self.matrices: dict[str, Stored] = {}
        self.notes: dict[str, list[str]] = {}       # why matrices are multiplied as fp32 values -> which

    def walk(self, report: Report) -> None:
        layers = self.model.model.layers
        for index, block in enumerate(layers):
            native = self.block(f"model.layers.{index}", block, report)
            if self.engine is not None:
                layers[index] = native
        self.norm(report)
        self.ends(report)
        if self.engine is not None and report.complete:
            self.whole(self.engine)
        report.tensors, report.parameters, report.matrices = self.taken, self.done, self.matrices
        report.notes = [f"{len(names)} matrices dequantised to float32, {reason}: {_some(names)}"
                        for reason, names in self.notes.items()]

    def whole(self, engine: _native.Engine) -> None:
        """One call for all but the head, or with it for the most likely tokens, where a family's pass is the usual one."""
        model, backbone = self.model, self.model.model
        kind, base = type(model), CausalLM
        if type(backbone) is not Backbone or kind.forward is not base.forward or kind.embed is not base.embed:
            return
        blocks = [block for block in backbone.layers if isinstance(block, NativeBlock)]
        embedding, norm = backbone.embed_tokens, backbone.norm
        head = model.top_head
        assert isinstance(embedding, NativeEmbedding) and isinstance(norm, NativeNorm) and isinstance(head, NativeTopHead)
        model.whole = NativeWhole(engine, embedding.matrix, model.embed_scale, blocks, norm.norm, head)

    # Weights.

    def source(self, name: str) -> From:
        return self.sources.get(name, From(name))

    def matrix(self, name: str, module: nn.Linear | nn.Embedding, *, head: bool = False) -> tuple[Any, str]:
        """A packed matrix and its type. raises Declined for a type without kernels."""
        rows, cols = module.weight.shape
        source = self.source(name)
        self.taken.add(source.name)
        packed = None
        if self.checkpoint.format != "dummy":
            form = codes.form_of(self.checkpoint, source)
            if form is not None and (kind := codes.native_type(form, cols)) is not None:
                return self._codes(name, kind, source, rows, cols, head)
            if form is not None:
                self.notes.setdefault(codes.why_not(form), []).append(source.name)
            packed = packed_source(self.checkpoint, source)
        if packed is not None and packed.type.name not in _native.types():
            raise Declined(f"no native kernel for weights of type {packed.type.name}")
        kind = self._float_kind(source) if packed is None else packed.type.name
        quantise = self.quantization is not None and kind in FLOATS
        ends = head or isinstance(module, nn.Embedding)      # four bits there cost more than everywhere else together
        final = QUANTISED["int8" if ends else self.quantization] if quantise and self.quantization else kind
        self.done += rows * cols
        if self.engine is None:
            stored = packed.raw.size if packed is not None else rows * cols * FLOATS[kind].itemsize
            self._count(name, Stored(final, codes.stored_bytes(final, rows, cols) if quantise else stored))
            return None, final
        raw = self._rows(name, source, FLOATS[kind], (rows, cols)) if packed is None else packed.raw
        try:
            split = head and self._splits(final, cols)
            matrix = self.engine.allocate(kind, rows, cols, quantise, split, final)
            for first in range(0, rows, ROWS_AT_ONCE):       # so that little of the mapped file is in memory at a time
                self.engine.fill(matrix, kind, np.ascontiguousarray(raw[first:first + ROWS_AT_ONCE]), first)
                if self.checkpoint.format != "dummy":
                    self.checkpoint.release(source.name)
        except ValueError as error:
            raise Declined(str(error)) from error
        return self._made_matrix(name, final, matrix), final

    def _codes(self, name: str, kind: str, source: From, rows: int, cols: int, head: bool) -> tuple[Any, str]:
        """A matrix that the checkpoint keeps as codes with scales and zeros."""
        self.done += rows * cols
        if self.engine is None:
            self._count(name, Stored(kind, codes.stored_bytes(kind, rows, cols)))
            return None, kind
        matrix = self.engine.allocate_codes(kind, rows, cols, head and self._splits(kind, cols))
        codes.fill(self.engine, matrix, self.checkpoint, source, rows, ROWS_AT_ONCE)
        return self._made_matrix(name, kind, matrix), kind

    def _splits(self, kind: str, cols: int) -> bool:
        """Split heads serve greedy decoding by halves; exact arithmetic reads them whole anyway."""
        assert self.engine is not None
        return kind == "Q8_0" and self.engine.prunes and self.precision == "int8" and cols <= MOST_SPLIT_COLUMNS

    def _count(self, name: str, stored: Stored) -> None:
        self.matrices[name] = stored
        self.nbytes += stored.nbytes

    def _made_matrix(self, name: str, kind: str, matrix: Any) -> Any:
        self._count(name, Stored(kind, matrix.nbytes, matrix.split))
        if self.progress is not None:
            self.progress(self.done, self.total)
        return matrix

    def _float_kind(self, source: From) -> str:
        """As stored, exact for what has to be dequantised first; made-up weights as most checkpoints have them."""
        if self.checkpoint.format == "dummy":
            return "BF16"
        stored = self.checkpoint.kind(source.name)
        return stored if stored in FLOATS else "F32"

    def _rows(self, name: str, source: From, dtype: torch.dtype, shape: tuple[int, int]) -> np.ndarray:
        """A float matrix as the bytes of its rows."""
        if self.checkpoint.format == "dummy":
            tensor = dummy_tensor(name, torch.Size(shape), dtype, "cpu")
        else:
            tensor = read_source(self.checkpoint, source, dtype)
        return tensor.contiguous().view(torch.uint8).numpy().reshape(shape[0], -1)

    def vector(self, name: str, size: int) -> list[float]:
        if self.checkpoint.format == "dummy" and self.engine is not None:
            return dummy_tensor(name, torch.Size([size]), torch.float32, "cpu").tolist()
        source = self.source(name)
        self.taken.add(source.name)
        if self.engine is None:
            return []
        values: list[float] = read_source(self.checkpoint, source, torch.float32).tolist()
        return values

    def linear(self, name: str, module: nn.Linear, kinds: list[str]) -> Any:
        matrix, kind = self.matrix(f"{name}.weight", module)
        kinds.append(kind)
        bias = [] if module.bias is None else self.vector(f"{name}.bias", module.out_features)
        return None if matrix is None else _native.Linear(matrix, bias, self.precision)

    def norm_of(self, name: str, module: nn.Module | None) -> Any:
        if module is None:
            return _native.Norm()
        if isinstance(module, RMSNorm):
            weight = self.vector(f"{name}.weight", module.weight.numel())
            return _native.Norm("rms", [1 + w for w in weight] if module.plus_one else weight, [], module.eps)
        if isinstance(module, nn.LayerNorm):
            size = module.weight.numel()
            bias = [] if module.bias is None else self.vector(f"{name}.bias", size)
            return _native.Norm("layer", self.vector(f"{name}.weight", size), bias, module.eps)
        raise Declined(f"no native {type(module).__name__}")

    # Layers.

    def block(self, name: str, block: nn.Module, report: Report) -> nn.Module:
        if not isinstance(block, ResidualBlock):
            report.layers.append(Lowered(name, reason=f"no native {type(block).__name__}"))
            return block
        parts: list[NativePart | None] = []
        names = {id(module): f"{name}.{child}" for child, module in block.named_children()}
        for before, inner, after in block.parts():
            kinds: list[str] = []
            where = names[id(inner)]
            try:
                around = [self.norm_of(names.get(id(norm), ""), norm) for norm in (before, after)]
                before_bytes = self.nbytes
                part = self._inner(where, inner, around, kinds)
                report.layers.append(Lowered(where, tuple(dict.fromkeys(kinds)), self.nbytes - before_bytes))
                parts.append(part)
            except Declined as reason:
                report.layers.append(Lowered(where, reason=str(reason)))
                parts.append(None)
        return block if all(part is None for part in parts) else NativeBlock(block, parts)

    def _inner(self, name: str, inner: nn.Module, around: list[Any], kinds: list[str]) -> NativePart | None:
        if type(inner) is Attention:              # a subclass computes something else
            return self._attention(name, inner, around, kinds)
        if isinstance(inner, (GatedMLP, MLP)):
            gate = self.linear(f"{name}.gate_proj", inner.gate_proj, kinds) if isinstance(inner, GatedMLP) else None
            up = self.linear(f"{name}.up_proj", inner.up_proj, kinds)
            down = self.linear(f"{name}.down_proj", inner.down_proj, kinds)
            block = self._made(_native.MlpBlock, *around, gate, up, down, inner.act_name)
            if self.engine is None:
                return None
            block.layer = _layer_of(name)
            return NativeMLP(self.engine, block)
        raise Declined(f"no native {type(inner).__name__}")

    def _attention(self, name: str, inner: Attention, around: list[Any], kinds: list[str]) -> NativePart | None:
        if self.cache_reason is not None:
            raise Declined(self.cache_reason)
        norms = [_native.Norm(), _native.Norm()]
        if inner.norm_over is not None:
            norms = [self.norm_of(f"{name}.q_norm", inner.q_norm), self.norm_of(f"{name}.k_norm", inner.k_norm)]
        projections = [self.linear(f"{name}.{leaf}", getattr(inner, leaf), kinds)
                       for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
        half = 0 if inner.rotary is None else len(inner.rotary.inv_freq)
        sinks = [] if inner.sinks is None else self.vector(f"{name}.sinks", len(inner.sinks))
        block = self._made(_native.AttentionBlock, *around, *norms, inner.norm_over == "head", *projections, inner.head_dim,
                           inner.scale, inner.softcap or 0.0, inner.window or 0, half, sinks)
        if self.engine is None:
            return None
        block.layer = _layer_of(name)
        return NativeAttention(self.engine, block, inner)

    def _made(self, kind: Any, *arguments: Any) -> Any:
        try:
            return None if self.engine is None else kind(*arguments)
        except ValueError as error:
            raise Declined(str(error)) from error

    def norm(self, report: Report) -> None:
        """The norm before the head."""
        try:
            size = self.model.config.hidden_size
            native = self.norm_of("model.norm", self.model.model.norm)
            if self.engine is not None:
                self.model.model.norm = NativeNorm(self.engine, native, size)
            report.layers.append(Lowered("model.norm"))
        except Declined as reason:
            report.layers.append(Lowered("model.norm", reason=str(reason)))

    def ends(self, report: Report) -> None:
        """Embeddings and head; one matrix where they are tied."""
        model = self.model
        try:
            embed = model.model.embed_tokens
            assert isinstance(embed, nn.Embedding) and isinstance(model.lm_head, nn.Linear)
            tied = model.lm_head.weight is embed.weight
            stored = "model.embed_tokens.weight"
            if tied:                                # a checkpoint may hold it under both names, or under either
                self.taken.add(self.source("lm_head.weight").name)
                if self.checkpoint.format != "dummy" and self.source(stored).name not in self.held:
                    stored = "lm_head.weight"
            before = self.nbytes
            matrix, kind = self.matrix(stored, embed, head=tied)
            embed_bytes = self.nbytes - before
            head, head_kind = (matrix, kind) if tied else self.matrix("lm_head.weight", model.lm_head, head=True)
        except Declined as reason:
            report.layers += [Lowered(n, reason=str(reason)) for n in ("model.embed_tokens", "lm_head")]
            return
        report.layers += [Lowered("model.embed_tokens", (kind,), embed_bytes),
                          Lowered("lm_head", (head_kind,), self.nbytes - before - embed_bytes)]
        if self.engine is None:
            return
        model.model.embed_tokens = NativeEmbedding(self.engine, matrix)
        linear = _native.Linear(head, [], self.precision)
        model.top_head = NativeTopHead(self.engine, linear, head)
        model.lm_head = NativeHead(  # type: ignore[assignment]
            self.engine, linear, head, model.top_head.rows)
