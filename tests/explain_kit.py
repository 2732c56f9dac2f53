"""A machine and a model made up for tests of the analysis: round numbers, so that times can be worked out by hand."""
from __future__ import annotations

from typing import Any

from ridgeline.analysis.advise import Question
from ridgeline.analysis.explain import Findings, badges, explain, verdict
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.subject import Subject

MACHINE = Hardware("test machine", 100e9, {"float32": 1e12, "bfloat16": 2e12, "int8": 4e12}, 16 * 10**9, device="gpu",
                   price_per_hour=1.5)
RAW: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True}


def spec(quantization: str | None = None, **fields: Any) -> Spec:
    """Of a Llama-like model, planned in bfloat16."""
    return plan_of({**RAW, **fields}, name="test model", quantization=quantization)


def subject(**fields: Any) -> Subject:
    return Subject(spec(**fields), MACHINE)


def findings(batch: int = 2, context: int = 512, output: int = 128) -> Findings:
    """Planned: nothing is measured."""
    model = {"name": "test <model>", "format": "plan", "architecture": "llama", "backend": "plan", "parameters": 10**8,
             "weight_bytes": 2 * 10**8, "weight_types": ["bf16"], "kv_cache_dtype": "bfloat16"}
    return explain(subject(), Question(batch, context, output), model=model, machines=[])


def measured(result: dict[str, Any], slower: float = 1.25) -> dict[str, Any]:
    """The same result as if everything had been measured and taken `slower` times what was predicted."""
    for stage in result["stages"]:
        stage["measured_s"] = slower * stage["predicted_s"]
        stage["share_of_roof"] = stage["roof_s"] / stage["measured_s"]
        for one in stage["components"]:
            one["measured_s"] = slower * one["predicted_s"]
            one["share_of_roof"] = one["roof_s"] / one["measured_s"] if one["measured_s"] else None
    for rows in result["sweeps"].values():
        for row in rows[:3]:
            row.update(measured_itl_s=slower * row["itl_s"], measured_tokens_per_s=row["tokens_per_s"] / slower,
                       measured_ttft_s=slower * row["ttft_s"])
    parts = {"queue": 0.001, "tokenise": 0.002, "prefill": 0.4, "decode: mlp.up": 0.3, "decode: attention.core": 0.2,
             "decode: head": 0.05, "sampling": 0.004, "detokenise": 0.003, "dispatch": 0.02, "idle": 0.0005}
    result["waterfall"] = {"parts": parts, "wall_s": 1.0, "residual_share": 1 - sum(parts.values())}
    for name in ("prefill", "decode"):
        step = {"attention.core": 0.004, "mlp.up": 0.003, "head": 0.001, "sampling": 0.0002, "dispatch": 0.0005}
        result["step_waterfalls"][name] = {"parts": step, "wall_s": 0.009, "residual_share": 1 - sum(step.values()) / 0.009}
    for advice in result["advice"][:3]:
        advice.update(verified_gain=0.9 * advice["predicted_gain"], interval=[0.8 * advice["predicted_gain"],
                                                                              1.01 * advice["predicted_gain"]])
    result["settings"]["measured"] = True
    result["badges"], result["verdict"] = badges(result), verdict(result)
    return result
