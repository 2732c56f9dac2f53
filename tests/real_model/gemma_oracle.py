"""Gemma 3 270M as transformers computes it, in fp32, and what the tests ask both sides."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from ridgeline.llm import LLM
from ridgeline.quality import hidden_states, log_probs
from ridgeline.weights.checkpoint import Checkpoint

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
ROWS = 64                # rows of logits held at once: 64 x 262,144 in fp64 are 134 MB

# Gemma 3 270M as published; tests compare it with what transformers reads from the GGUF file.
CONFIG: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32_768,
    "sliding_window": 512, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
}


def from_checkpoint(checkpoint: Checkpoint) -> Any:
    """transformers' model with our reader's weights: ready in seconds, where transformers' own reader takes half a minute.

    test_gemma_slow.py shows that both readers give the same bits.
    """
    weights = {name: checkpoint.read(name, torch.float32) for name in checkpoint.names()}
    config = Gemma3TextConfig(**CONFIG)
    return Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def from_gguf(path: Path) -> Any:
    """transformers' model with transformers' own reading of the file."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def divergences(llm: LLM, oracle: Any, ids: Sequence[int]) -> Tensor:
    """KL(oracle || engine) after each token, in nats, in fp64. The engine runs its own path: chunks and cache."""
    ours = hidden_states(llm, list(ids))                                                    # (tokens, hidden)
    theirs = oracle.model(torch.tensor([list(ids)])).last_hidden_state[0]
    found = []
    for a in range(0, len(ids), ROWS):
        q = log_probs(llm, ours[a:a + ROWS])                                                # (rows, vocabulary)
        p = oracle.lm_head(theirs[a:a + ROWS]).double().log_softmax(-1)
        found.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(found)


@torch.inference_mode()
def greedy(oracle: Any, ids: Sequence[int], count: int) -> list[int]:
    """The next tokens, one by one over transformers' own cache."""
    out: list[int] = []
    feed, past = torch.tensor([list(ids)]), None
    while len(out) < count:
        step = oracle(feed, cache=past, use_cache=True, logits_to_keep=1)
        past = step.cache
        out.append(int(step.logits[0, -1].argmax()))
        feed = torch.tensor([out[-1:]])
    return out


@torch.inference_mode()
def favourites(oracle: Any, ids: Sequence[int], continuation: Sequence[int]) -> list[int]:
    """The most likely token at each position of a continuation: equal to it exactly if it is the greedy one.

    One pass, where `greedy` takes one a token.
    """
    row = torch.tensor([[*ids, *continuation[:-1]]])
    found: list[int] = oracle(row, logits_to_keep=len(continuation)).logits[0].argmax(-1).tolist()
    return found
