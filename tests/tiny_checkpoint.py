"""Checkpoint folders of tiny random models with a trained byte-level tokenizer. Shared by tests/api and tests/cli."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ridgeline.decoding.base import Commit, Run, SequenceView, Steps, Strategy
from ridgeline.models import build_model
from ridgeline.types import TokenLogprobs

torch.set_num_threads(1)

TEXT = ("The sea is calm and the light is low. The keeper of the lighthouse opened the door, and the wind came in. "
        "海は静かで、光は低い。灯台守は扉を開けた。大海很平静。Ünïcödé naïve café. 🙂🚀👩‍🚀 end of the text. ") * 4
SPECIAL = ("<bos>", "<eos>", "<user>", "<assistant>")
HARMONY = (*SPECIAL, "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages here') }}"
            "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def train_tokenizer(vocabulary: int = 320, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Byte-level BPE. The text is short, so that rare characters stay in pieces of their bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in special]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))])
    return tokenizer


def write_tokenizer(folder: Path, special: Sequence[str] = SPECIAL) -> Tokenizer:
    tokenizer = train_tokenizer(special=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}))
    return tokenizer


def write_model(folder: Path, *, seed: int = 0, vocabulary: int = 320, sharpness: float = 1.5, **config: Any) -> None:
    """config.json and random float32 weights. sharpness: how far the model's distributions are from uniform."""
    raw = {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
           "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
           **config}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in build_model(raw).named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        tensors[name] = 1 + 0.2 * values if parameter.dim() == 1 else sharpness * values * parameter.shape[-1] ** -0.5
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, str(folder / "model.safetensors"))


def write_checkpoint(folder: Path, special: Sequence[str] = SPECIAL, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, **options)
    write_tokenizer(folder, special)
    return folder


class Script(Strategy):
    """Commits given tokens, `sizes` of them at a time (the last size again and again), whatever the model says."""

    def __init__(self, tokens: Sequence[int], sizes: Sequence[int] = (1,)):
        self.tokens, self.sizes = list(tokens), list(sizes)

    def lookahead(self) -> int:
        return 0

    def run(self, seq: SequenceView) -> Steps:
        left, sizes = self.tokens[len(seq.tokens) - seq.prompt_len:], list(self.sizes)
        while not seq.done:
            yield Run(self.target, seq.pending(self.target))
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            now, left = left[:size], left[size:]
            logprobs = [TokenLogprobs(token, -1.0, 1, [(token, -1.0), (0, -2.0)]) for token in now]
            yield Commit(now, logprobs=logprobs if seq.params.logprobs is not None else [])
