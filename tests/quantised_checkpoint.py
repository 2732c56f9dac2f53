"""Tiny checkpoints in the formats AWQ, GPTQ and compressed-tensors, written bit by bit from their descriptions."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_checkpoint import write_model

Tensors = dict[str, Tensor]


@dataclass
class Matrix:
    """w[r][c] = scales[r][g] * (codes[r][c] - zeros[r][g]) with g = order[c]; group: columns that share a scale, by default."""

    bits: int
    group: int
    codes: Tensor            # (rows, cols) int64
    scales: Tensor           # (rows, groups) as stored
    zeros: Tensor            # (rows, groups) int64
    order: list[int]

    def values(self) -> Tensor:
        """(rows, cols) fp32, one value at a time."""
        rows, cols = self.codes.shape
        codes, scales, zeros = self.codes.tolist(), self.scales.float().tolist(), self.zeros.tolist()
        out = [[scales[r][self.order[c]] * (codes[r][c] - zeros[r][self.order[c]]) for c in range(cols)] for r in range(rows)]
        return torch.tensor(out, dtype=torch.float64).float()      # a product of 24 and 9 bits is exact in fp64


def random_matrix(like: Tensor, generator: torch.Generator, *, bits: int, group: int, symmetric: bool,
                  dtype: torch.dtype = torch.float16, shuffled: bool = False, one_scale: bool = False) -> Matrix:
    """Of about the same size and spread as `like`. group -1: the whole row."""
    rows, cols = like.shape
    size = cols if group == -1 else group
    count = -(-cols // size)
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=generator)
    middle = 1 << bits - 1
    zeros = torch.full((rows, count), middle)
    if not symmetric:
        zeros = torch.randint(max(1, middle - 20), min(2 * middle, middle + 20), (rows, count), generator=generator)
    spread = (0.5 + torch.rand(rows, count, generator=generator)) * float(like.float().std()) / (1 << bits) * 3
    if one_scale:
        spread, zeros = spread[:1, :1].expand(rows, count), zeros[:1, :1].expand(rows, count)
    order = [c // size for c in range(cols)]
    if shuffled:
        order = [order[i] for i in torch.randperm(cols, generator=generator).tolist()]
    return Matrix(bits, size, codes, spread.to(dtype), zeros, order)


def int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def pack(fields: list[list[int]], bits: int, places: list[int]) -> Tensor:
    """Rows of fields -> rows of 32-bit words; field i of a word goes to place places[i], the last word may be short."""
    per_word = 32 // bits
    out = []
    for row in fields:
        words = []
        for start in range(0, len(row), per_word):
            word = 0
            for i, value in enumerate(row[start:start + per_word]):
                word |= value << bits * places[i]
            words.append(int32(word))
        out.append(words)
    return torch.tensor(out, dtype=torch.int32)


def awq(base: str, m: Matrix, zeros: bool = True) -> Tensors:
    place = [0, 4, 1, 5, 2, 6, 3, 7]             # of columns 0 to 7 of a word: AWQ stores columns 0 2 4 6 1 3 5 7
    out = {f"{base}.qweight": pack(m.codes.T.tolist(), 4, place), f"{base}.scales": m.scales.T.contiguous()}
    return {**out, f"{base}.qzeros": pack(m.zeros.T.tolist(), 4, place)} if zeros else out


def gptq(base: str, m: Matrix, less: int = 1, g_idx: bool = True) -> Tensors:
    plain = list(range(32 // m.bits))
    out = {f"{base}.qweight": pack(m.codes.tolist(), m.bits, plain).T.contiguous(),
           f"{base}.qzeros": pack((m.zeros - less).T.tolist(), m.bits, plain), f"{base}.scales": m.scales.T.contiguous()}
    return {**out, f"{base}.g_idx": torch.tensor(m.order, dtype=torch.int32)} if g_idx else out


def compressed(base: str, m: Matrix, *, packed: bool = True, symmetric: bool = True, one_scale: bool = False,
               order: bool = False) -> Tensors:
    plain, middle = list(range(32 // m.bits)), 1 << m.bits - 1
    scales, zeros = (m.scales[:1, 0], m.zeros[:1, 0]) if one_scale else (m.scales, m.zeros)
    out = {f"{base}.weight_scale": scales.contiguous()}
    if packed:
        out[f"{base}.weight_packed"] = pack(m.codes.tolist(), m.bits, plain)
        out[f"{base}.weight_shape"] = torch.tensor(m.codes.shape)
    else:
        out[f"{base}.weight"] = (m.codes - middle).to(torch.int8)
    if not symmetric:
        out[f"{base}.weight_zero_point"] = (pack(zeros.T.tolist(), m.bits, plain).T.contiguous() if packed and not one_scale
                                            else (zeros - middle).to(torch.int8))
    if order:
        out[f"{base}.weight_g_idx"] = torch.tensor(m.order, dtype=torch.int32)
    return out


def weights_config(bits: int, group: int, symmetric: bool, *, strategy: str = "group") -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}


def compressed_config(weights: dict[str, Any], *, layout: str = "pack-quantized", targets: tuple[str, ...] = ("Linear",),
                      ignore: tuple[str, ...] = ("lm_head",), **group: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": list(ignore), "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": list(targets), "weights": weights, "input_activations": None, **group}}}


@dataclass
class Case:
    """config: the quantization_config; write: a matrix as its tensors; kinds: of native matrices; model: of config.json."""

    config: dict[str, Any]
    write: Callable[[str, Matrix], Tensors]
    matrix: dict[str, Any]
    kind: str
    heads: bool = False          # lm_head and embeddings too
    model: dict[str, Any] = field(default_factory=dict)


def write_quantised(folder: Path, case: Case) -> tuple[dict[str, Tensor], Path]:
    """A tiny model whose linear layers are `case` -> the values of the quantised weights, a folder with the same in fp32."""
    model = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, **case.model}
    plain = folder / "plain"
    plain.mkdir(parents=True)
    write_model(plain, sharpness=1.0, **model)
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(7)
    stored, values = {}, {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        ends = base in ("lm_head", "model.embed_tokens")
        if tensor.dim() != 2 or (ends and not case.heads):
            stored[name] = tensor
            continue
        matrix = random_matrix(tensor, generator, **case.matrix)
        stored.update(case.write(base, matrix))
        values[name] = matrix.values()
    save_file(stored, folder / "model.safetensors")
    save_file({**tensors, **values}, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": case.config}))
    return values, plain
