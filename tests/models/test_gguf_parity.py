"""The F32 and Q8_0 files that llama.cpp's converter made of a tiny checkpoint give that checkpoint's logits."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ridgeline.batch import whole
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.load import load_weights

DATA = Path(__file__).parents[1] / "data" / "gguf"
EVERY = pytest.mark.parametrize("family", sorted(folder.name for folder in DATA.iterdir() if folder.is_dir()))

# Longer than every sliding window of the checkpoints (8 and 24). Both longer than the 32 tokens at which transformers
# changes from phi3's short factors to the long ones: an engine keeps one set, since cached keys cannot change.
LENGTHS = (48, 37)

# NMSE of Q8_0 logits. A block's step is its largest value / 127, about 2.1 standard deviations / 127 for 32 normal
# values: rounding adds 2.1^2 / 127^2 / 12 = 2.3e-5 of a weight's variance. Some 7 matrices a layer add up to 1e-4 - 1e-3,
# more where layers amplify (measured: 6e-5 for llama to 1.7e-3 for qwen3_5). A wrong row, scale or order gives about 1.
TOLERANCE_Q8_0 = 5e-3


def load(path: Path) -> CausalLM:
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config)
    load_weights(model, checkpoint, dtype=torch.float32)
    return model


def prompts(vocab: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def logits(model: CausalLM) -> torch.Tensor:
    """(tokens of all prompts, vocabulary)"""
    flat = torch.tensor([token for prompt in prompts() for token in prompt])
    return model.logits(model(whole(list(LENGTHS), flat)).hidden)


@torch.no_grad()
def expected(folder: Path) -> torch.Tensor:
    """The same by transformers. attention eager: its other implementations leave the soft-caps out."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return torch.cat([oracle(torch.tensor([prompt])).logits[0] for prompt in prompts()])


@EVERY
def test_safetensors_equal_transformers(family: str) -> None:
    oracle = expected(DATA / family)
    assert oracle.std() > 0.3                        # logits of a model that distinguishes tokens
    assert (logits(load(DATA / family)) - oracle).abs().max() <= 1e-4


@EVERY
def test_f32_gguf_equals_safetensors(family: str) -> None:
    found, original = logits(load(DATA / family / "model-f32.gguf")), logits(load(DATA / family))
    assert (found - original).abs().max() <= 1e-4


@EVERY
def test_q8_0_gguf_is_as_close_as_eight_bits_allow(family: str) -> None:
    found, original = logits(load(DATA / family / "model-q8_0.gguf")), logits(load(DATA / family))
    error = float((found - original).square().mean() / original.square().mean())
    assert 1e-6 < error <= TOLERANCE_Q8_0            # not zero: the file is quantised
