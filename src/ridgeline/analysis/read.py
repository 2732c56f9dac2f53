"""From a model, loaded or on the meta device, to the spec that its cost is counted from."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ridgeline.analysis.planned import DENSE, replaced
from ridgeline.analysis.spec import Attention, Feed, Layer, Matrix, Mixer, Mlp, Part, Recurrent, Spec
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError, UnsupportedModel
from ridgeline.layers.attention import Attention as AttentionLayer
from ridgeline.layers.block import Part as BlockPart
from ridgeline.layers.block import ResidualBlock
from ridgeline.layers.delta import GatedDeltaNet
from ridgeline.layers.mlp import MLP, GatedMLP
from ridgeline.loading import LoadedModel, activation_dtype
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM

PLANNED = {None: ("bf16", "bf16"), "int8": ("q8_0", "q8_0"), "int4": ("q4_0", "q8_0")}   # of layers, of embeddings and head
EMBEDDING = "model.embed_tokens.weight"
FLOAT_KIND = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}

Store = Callable[[str, nn.Module], Matrix]      # a parameter's name and its module -> the matrix as it is stored


def spec_of(loaded: LoadedModel, shapes: LoadedModel, config: EngineConfig) -> Spec:
    """What the engine runs. loaded: with its weights; shapes: the same model before loading (`describe`), where every layer is
    still a torch module."""
    report = loaded.report
    matrices = {} if report is None else report.matrices
    left = torch.float32 if report is not None else loaded.dtype          # what is left to torch goes along in fp32

    tied = shapes.model.config.tied                # then a checkpoint may hold the matrix under either name

    def store(name: str, module: nn.Module) -> Matrix:
        rows, cols = module.weight.shape  # type: ignore[misc]
        found = matrices.get(name) or (matrices.get("lm_head.weight") if name == EMBEDDING and tied else None)
        if found is None:
            return Matrix(rows, cols, FLOAT_KIND[left], rows * cols * left.itemsize)
        return Matrix(rows, cols, found.kind.lower(), found.nbytes)

    declined = set() if report is None else {layer.name for layer in report.declined}
    return _spec(shapes.model, loaded.name, store, declined, kv_dtype=_name(loaded.layout.kv_dtype),
                 precision=_name(left) if report is None else activation_dtype(config), stream=left.itemsize,
                 kernels="torch" if report is None else "native",
                 head_split=any(m.split for m in matrices.values()))


def plan_of(raw: Mapping[str, Any], *, name: str = "", quantization: str | None = None, kv_dtype: str = "bfloat16",
            kernels: str = "fused", stream: int = 2, precision: str = "bfloat16") -> Spec:
    """A model of a config.json alone: nothing is loaded. quantization: of its layers, as the engine's flag; embeddings and head
    keep 8 bits. stream: bytes of an activation; precision: arithmetic of the products.

    Knows what the engine runs, and mixtures of experts and latent attention by the fields of their configs. raises
    UnsupportedModel naming what is missing, ConfigError for another quantization.
    """
    if quantization not in PLANNED:
        raise ConfigError(f"quantization is {quantization!r}; valid: {', '.join(map(str, PLANNED))}")
    layers, ends = PLANNED[quantization]
    dense = DENSE.get(str(raw.get("model_type")))
    base = dict(raw) if dense is None else {"sliding_window": None, **raw, **dense}
    model = build_model(base)

    def store(parameter: str, module: nn.Module) -> Matrix:
        rows, cols = module.weight.shape  # type: ignore[misc]
        return Matrix.of(rows, cols, layers if parameter.startswith("model.layers.") else ends)

    spec = _spec(model, name, store, set(), kv_dtype=kv_dtype, precision=precision, stream=stream, kernels=kernels)
    return spec if dense is None else replaced(spec, raw, layers)


def _spec(model: CausalLM, name: str, store: Store, declined: set[str], **how: Any) -> Spec:
    c = model.config
    if model.feed_width is not None:
        raise UnsupportedModel(f"the cost of a {c.model_type} is not known: it reads another model's hidden rows")
    layers = []
    for index, block in enumerate(model.model.layers):
        if not isinstance(block, ResidualBlock):
            raise UnsupportedModel(f"the cost of a {type(block).__name__} is not known")
        names = {id(module): f"model.layers.{index}.{child}" for child, module in block.named_children()}
        mix, feed = (_part(part, names[id(part.inner)], store, declined) for part in block.parts())
        layers.append(Layer(mix, feed))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    embed = store(EMBEDDING, model.model.embed_tokens)
    head = embed if tied else store("lm_head.weight", model.lm_head)
    matrices = [m for layer in layers for part in (layer.mix, layer.feed) for m in part.inner.matrices]
    held = sum(m.parameters for m in (*matrices, embed)) + (0 if tied else head.parameters)
    return Spec(name, c.hidden_size, c.vocab_size, tuple(layers), embed, head, tied, max_context=c.max_position,
                other_parameters=sum(p.numel() for p in model.parameters()) - held, **how)


def _part(part: BlockPart, name: str, store: Store, declined: set[str]) -> Part:
    read = next((READERS[kind] for kind in type(part.inner).__mro__ if kind in READERS), None)
    if read is None:
        raise UnsupportedModel(f"the cost of a {type(part.inner).__name__} is not known")
    return Part(read(part.inner, name, store), part.before is not None, part.after is not None, name not in declined)


def _attention(inner: Any, name: str, store: Store) -> Mixer:
    q, k, v, o = (store(f"{name}.{leaf}.weight", getattr(inner, leaf)) for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"))
    rotated = 0 if inner.rotary is None else 2 * len(inner.rotary.inv_freq)
    heads = o.cols // inner.head_dim
    return Attention(q, k, v, o, heads, k.rows // inner.head_dim, inner.head_dim, inner.window, inner.norm_over or "", rotated,
                     gated=q.rows > o.cols)


def _mlp(inner: Any, name: str, store: Store) -> Feed:
    gate = store(f"{name}.gate_proj.weight", inner.gate_proj) if isinstance(inner, GatedMLP) else None
    return Mlp(store(f"{name}.up_proj.weight", inner.up_proj), store(f"{name}.down_proj.weight", inner.down_proj), gate)


def _delta(inner: Any, name: str, store: Store) -> Mixer:
    qkv, z, b, a, out = (store(f"{name}.{leaf}.weight", getattr(inner, leaf))
                         for leaf in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
    return Recurrent(qkv, z, b, a, out, inner.dt_bias.shape[0], inner.key_dim, inner.norm.weight.shape[0],
                     inner.conv1d.weight.shape[-1])


READERS: dict[type, Callable[[Any, str, Store], Mixer | Feed]] = {
    AttentionLayer: _attention, GatedDeltaNet: _delta, GatedMLP: _mlp, MLP: _mlp}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
