"""Make tests/data/gguf: tiny random checkpoints, and what llama.cpp's own converter makes of them.

    python tests/data/make_gguf_fixtures.py PATH_TO_LLAMA_CPP [FAMILY ...]

needs transformers, and a llama.cpp source folder with convert_hf_to_gguf.py (llama-cpp-python's source
distribution has one in vendor/llama.cpp). For each family it writes config.json and model.safetensors (bfloat16
values, so that they survive every conversion unrounded), model-f32.gguf and model-q8_0.gguf.

Norms, biases and decays are random: left at one and zero they would hide mistakes. The tokenizer is a stand-in of
64 pieces, written without the converter's check for known tokenizers; nothing here tests text.
"""
from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent / "gguf"
VOCAB = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def family_configs() -> dict[str, Any]:
    # llama: wave lengths of 6, 63, 628 and 6283 positions: untouched, blended, divided, divided.
    llama3 = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    longrope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.25, 1.5],
        "long_factor": [1.0, 2.0, 3.5, 4.75], "original_max_position_embeddings": 32,
    }
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "beta_slow": 2.0,
    }
    gemma3_rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    small = {**COMMON, "intermediate_size": 32}
    gemma = {**small, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    T = transformers
    return {
        "llama": T.LlamaConfig(**COMMON, rope_parameters=llama3, rms_norm_eps=1e-5, attention_bias=True),
        "mistral": T.MistralConfig(**small, rope_parameters=PLAIN_ROPE, sliding_window=None),
        "qwen2": T.Qwen2Config(**COMMON, rope_parameters=yarn, tie_word_embeddings=True),
        "qwen3": T.Qwen3Config(**small, rope_parameters=PLAIN_ROPE, head_dim=16),
        "phi3": T.Phi3Config(
            **COMMON, rope_parameters=longrope, original_max_position_embeddings=32, sliding_window=24
        ),
        "olmo2": T.Olmo2Config(**small, rope_parameters=PLAIN_ROPE, rms_norm_eps=1e-6),
        "gemma2": T.Gemma2Config(
            **gemma,
            rope_parameters={**PLAIN_ROPE, "rope_theta": 10000.0},  # not recorded: gemma2 has no other
            attn_logit_softcapping=20.0,
            final_logit_softcapping=10.0,
        ),
        # The converter writes no pattern, so readers assume five sliding layers, then a full one.
        "gemma3_text": T.Gemma3TextConfig(
            **{**gemma, "num_hidden_layers": 6, "num_key_value_heads": 1}, rope_parameters=gemma3_rope
        ),
        "gpt2": T.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
        "qwen3_5_text": T.Qwen3_5TextConfig(
            **small,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_conv_kernel_dim=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        ),
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter random and exactly a bfloat16; spread as in trained models, so that logits differ."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            value = noise.sigmoid().mul(8).add(0.5).log()
        elif parameter.ndim == 1:
            # Multiples of 1/64 stay exact when the converter adds one to them.
            ones = name.endswith("weight") and float(parameter.detach().mean()) > 0.5
            value = (noise * 0.3 * 64).round() / 64 + (1.0 if ones else 0.0)
        else:
            value = noise * (0.8 / math.sqrt(parameter.shape[-1]))
        parameter.data.copy_(value.to(torch.bfloat16))


def write_model(config: Any, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if config.model_type == "gpt2":  # the converter reads the context length under its oldest name
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**saved, "n_ctx": config.n_positions}, indent=2) + "\n")


def write_tokenizer_size(folder: Path) -> None:
    """The converter cuts gemma3's embedding down to as many rows as tokenizer.json has pieces."""
    pieces = {piece(i): i for i in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}, "added_tokens": []}))


def piece(index: int) -> str:
    return ["<pad>", "<s>", "</s>"][index] if index < 3 else chr(ord("!") + index)


def stand_in_vocabulary(model: Any) -> None:
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([piece(i) for i in range(VOCAB)])
    writer.add_token_types([3 if i < 3 else 1 for i in range(VOCAB)])
    writer.add_token_merges([f"{piece(10)} {piece(11)}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def convert(llama_cpp: Path, source: Path, target: Path, file_type: str) -> None:
    if str(llama_cpp) not in sys.path:
        sys.path.insert(0, str(llama_cpp))
        sys.path.insert(0, str(llama_cpp / "gguf-py"))
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture

    hparams = ModelBase.load_hparams(source, False)
    converter = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    patched = type(converter.__name__, (converter,), {
        "model_arch": converter.model_arch,
        "set_vocab": stand_in_vocabulary,
        "no_mtp": True,
    })
    with torch.inference_mode():
        patched(source, gguf.LlamaFileType[file_type], target, eager=True, hparams=hparams, model_name="tiny").write()


def main() -> None:
    llama_cpp = Path(sys.argv[1]).resolve()
    configs = family_configs()
    for seed, (family, config) in enumerate(configs.items()):
        if sys.argv[2:] and family not in sys.argv[2:]:
            continue
        target = HERE / family
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "tiny"
            write_model(config, folder, seed)
            write_tokenizer_size(folder)
            convert(llama_cpp, folder, target / "model-f32.gguf", "ALL_F32")
            convert(llama_cpp, folder, target / "model-q8_0.gguf", "MOSTLY_Q8_0")
            for file in ("config.json", "model.safetensors"):
                shutil.copy(folder / file, target / file)
        print(f"{family}: {sum(f.stat().st_size for f in target.iterdir()) // 1024} KiB")


if __name__ == "__main__":
    main()
