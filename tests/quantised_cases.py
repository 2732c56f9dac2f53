"""The formats of quantised safetensors that the tests run, each with the native kind that must hold it."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quantised_checkpoint import Case, awq, compressed, compressed_config, gptq, weights_config


def _awq(group: int, kind: str, symmetric: bool = False, **config: Any) -> Case:
    return Case({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": not symmetric,
                 **config}, partial(awq, zeros=not symmetric), {"bits": 4, "group": group, "symmetric": symmetric}, kind)


def _gptq(bits: int, group: int, kind: str, symmetric: bool = False, less: int = 1, g_idx: bool = True, shuffled: bool = False,
          **config: Any) -> Case:
    return Case({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": shuffled, **config},
                partial(gptq, less=less, g_idx=g_idx),
                {"bits": bits, "group": group, "symmetric": symmetric, "shuffled": shuffled}, kind)


def _compressed(bits: int, group: int, kind: str, symmetric: bool = True, packed: bool = True, strategy: str = "group",
                dtype: torch.dtype = torch.float16, order: bool = False, model: dict[str, Any] | None = None,
                **config: Any) -> Case:
    one = strategy == "tensor"
    return Case(compressed_config(weights_config(bits, group, symmetric, strategy=strategy),
                                  layout="pack-quantized" if packed else "int-quantized", **config),
                partial(compressed, packed=packed, symmetric=symmetric, one_scale=one, order=order),
                {"bits": bits, "group": group, "symmetric": symmetric, "dtype": dtype, "one_scale": one, "shuffled": order},
                kind, model=model or {})


ODD: dict[str, Any] = {"hidden_size": 44, "intermediate_size": 101, "head_dim": 6}
BOTH = {"targets": ("Linear", "Embedding"), "ignore": ()}

CASES: dict[str, Case] = {
    "awq, groups of 32": _awq(32, "INT4_G32"),
    "awq, old field names": _awq(32, "INT4_G32", w_bit=4, q_group_size=32, version="GEMM"),
    "awq, whole rows": _awq(-1, "INT4_G128"),
    "awq, symmetric": _awq(32, "INT4_G32", symmetric=True),
    "gptq, groups of 32": _gptq(4, 32, "INT4_G32"),
    "gptq, v2 zeros": _gptq(4, 32, "INT4_G32", less=0, checkpoint_format="gptq_v2"),
    "gptq, symmetric, no g_idx": _gptq(4, 32, "INT4_G32", symmetric=True, g_idx=False),
    "gptq, 8 bits": _gptq(8, 32, "INT8_G32"),
    "gptq, 8 bits, whole rows": _gptq(8, -1, "INT8_G128", symmetric=True),
    "gptq, in the order of activations": _gptq(4, 32, "F32", shuffled=True),
    "gptq, groups of 16": _gptq(4, 16, "F32"),
    "compressed, groups of 32": _compressed(4, 32, "Q4_0"),
    "compressed, bf16 scales": _compressed(4, 32, "INT4_G32", dtype=torch.bfloat16),
    "compressed, fp32 scales, asymmetric": _compressed(4, 32, "INT4_G32", symmetric=False, dtype=torch.float32),
    "compressed, channels": _compressed(4, -1, "INT4_G128", strategy="channel"),
    "compressed, channels, odd sizes": _compressed(4, -1, "INT4_G128", strategy="channel", symmetric=False, model=ODD),
    "compressed, 8 bits, channels, odd sizes": _compressed(8, -1, "INT8_G128", strategy="channel", model=ODD),
    "compressed, 8 bits, asymmetric": _compressed(8, 32, "INT8_G32", symmetric=False),
    "compressed, 8 bits as in blocks of 32": _compressed(8, 32, "Q8_0"),
    "compressed, one scale": _compressed(8, -1, "INT8_G128", strategy="tensor", symmetric=False, packed=False),
    "compressed, int8": _compressed(8, -1, "INT8_G128", strategy="channel", packed=False, dtype=torch.bfloat16),
    "compressed, int8, asymmetric": _compressed(8, -1, "INT8_G128", strategy="channel", packed=False, symmetric=False),
    "compressed, in the order of activations": _compressed(4, 32, "F32", order=True),
}
# Wide enough for groups of 64 and 128 that are not whole rows.
WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 384, "num_hidden_layers": 1}
for _group, _kind in ((64, "INT4_G64"), (128, "INT4_G128"), (96, "INT4_G32")):
    CASES[f"compressed, groups of {_group}"] = _compressed(
        4, _group, _kind, model=WIDE if _group != 96 else {**WIDE, "hidden_size": 192}, symmetric=False)
CASES["compressed, 8 bits, groups of 64"] = _compressed(8, 64, "INT8_G32", model=WIDE)
CASES["awq, groups of 128"] = _awq(128, "INT4_G128")
CASES["awq, groups of 128"].model.update(WIDE)
HEADS = Case(compressed_config(weights_config(8, 32, True), targets=BOTH["targets"], ignore=BOTH["ignore"]), compressed,
             {"bits": 8, "group": 32, "symmetric": True}, "Q8_0", heads=True)
CASES["compressed, head and embeddings"] = HEADS
