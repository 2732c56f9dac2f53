"""load_weights: every parameter from its source, shared ones once, and errors that name the tensor."""
from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ridgeline.errors import CorruptFile, ModelError
from ridgeline.weights.checkpoint import Checkpoint, open_checkpoint
from ridgeline.weights.load import load_weights, packed_source
from ridgeline.weights.mapping import From

DATA = Path(__file__).parents[1] / "data" / "gguf"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.weight.keep_fp32 = True  # type: ignore[attr-defined]


class Small(nn.Module):
    """q and k are rows of a fused tensor, turned is stored transposed, the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.q = nn.Linear(4, 8, bias=False)
        self.k = nn.Linear(4, 2, bias=False)
        self.turned = nn.Linear(4, 3)
        self.out_norm = Norm()
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def sources(self) -> dict[str, From]:
        return {
            "q.weight": From("qk.weight", rows=(0, 8)),
            "k.weight": From("qk.weight", rows=(8, 10)),
            "turned.weight": From("turned.weight", transpose=True),
        }


def meta_model() -> Small:
    with torch.device("meta"):
        return Small()


TENSORS = {
    "embed.weight": torch.randn(6, 4),
    "qk.weight": torch.randn(10, 4),
    "turned.weight": torch.randn(4, 3),
    "turned.bias": torch.randn(3),
    "out_norm.weight": torch.randn(4),
    "counts": torch.tensor([3, 5]),
}


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_comes_from_its_source(tmp_path: Path, dtype: torch.dtype) -> None:
    model, steps = meta_model(), []
    load_weights(model, checkpoint(tmp_path, TENSORS), dtype=dtype, progress=lambda *step: steps.append(step))
    assert torch.equal(model.embed.weight, TENSORS["embed.weight"].to(dtype))
    assert torch.equal(model.q.weight, TENSORS["qk.weight"][:8].to(dtype))
    assert torch.equal(model.k.weight, TENSORS["qk.weight"][8:].to(dtype))
    assert torch.equal(model.turned.weight, TENSORS["turned.weight"].T.to(dtype))
    assert torch.equal(model.turned.bias, TENSORS["turned.bias"].to(dtype))
    assert model.lm_head.weight is model.embed.weight
    assert model.out_norm.weight.dtype == torch.float32 and model.out_norm.weight.keep_fp32
    assert torch.equal(model.out_norm.weight, TENSORS["out_norm.weight"])
    assert model.counts.tolist() == [3, 5] and model.counts.dtype == torch.int64
    assert model.scratch.is_meta  # not persistent: the model's own business
    total = sum(t.numel() * t.element_size() for t in TENSORS.values())
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})


def test_a_shared_parameter_may_be_stored_under_either_name(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    tensors["lm_head.weight"] = tensors.pop("embed.weight")
    model = meta_model()
    load_weights(model, checkpoint(tmp_path, tensors), dtype=torch.float32)
    assert torch.equal(model.embed.weight, TENSORS["embed.weight"])
    assert model.lm_head.weight is model.embed.weight


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    some = {name: TENSORS[name] for name in list(TENSORS)[:4]}
    with pytest.raises(ModelError, match=r"2 tensors are missing: counts, out_norm\.weight") as caught:
        load_weights(meta_model(), checkpoint(tmp_path, some), dtype=torch.float32)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ModelError, match=r"7 tensors are missing: .* and 2 more$"):
        load_weights(meta_model(), checkpoint(tmp_path, {"other": torch.ones(1)}), dtype=torch.float32)


@pytest.mark.parametrize(("name", "shape", "message"), [
    ("out_norm.weight", (5,), r"'out_norm\.weight' has the shape \[5\].*gives \[4\]"),
    ("qk.weight", (9, 4), r"'qk\.weight' has the shape \[9, 4\].*k\.weight needs rows 8 to 10 .*gives \[2, 4\]"),
    ("turned.weight", (3, 4), r"'turned\.weight' has the shape \[3, 4\].*gives \[3, 4\]"),
    ("embed.weight", (6, 4, 1), r"'embed\.weight' has the shape \[6, 4, 1\].*gives \[6, 4\]"),
])
def test_a_wrong_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        load_weights(meta_model(), checkpoint(tmp_path, {**TENSORS, name: torch.ones(shape)}), dtype=torch.float32)


def test_leftovers_warn_unless_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harmless = ["model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.bias", "h.0.attn.masked_bias",
                "vision_tower.a.weight", "model.visual.b.weight", "multi_modal_projector.c", "mtp.layers.0.d.weight"]
    extra = {name: torch.ones(1) for name in harmless}
    with caplog.at_level(logging.WARNING):
        load_weights(meta_model(), checkpoint(tmp_path, {**TENSORS, **extra}), dtype=torch.float32)
        assert not caplog.records
        load_weights(meta_model(), checkpoint(tmp_path, {**TENSORS, "rest.weight": torch.ones(1)}), dtype=torch.float32)
    assert "1 tensors are not used: rest.weight" in caplog.text


def test_gguf_slices_of_fused_tensors_and_their_blocks() -> None:
    """phi3's qkv as three parameters: the values, and the blocks that a kernel would take."""
    file = open_checkpoint(DATA / "phi3" / "model-q8_0.gguf")
    fused = "model.layers.1.self_attn.qkv_proj.weight"

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False)

        def sources(self) -> dict[str, From]:
            return {"q.weight": From(fused, rows=(0, 32)), "k.weight": From(fused, rows=(32, 48))}

    with torch.device("meta"):
        model = Attention()
    load_weights(model, file, dtype=torch.float32)
    whole = file.read(fused, torch.float32)
    assert torch.equal(torch.cat([model.q.weight, model.k.weight]), whole[:48])
    blocks, part = file.packed(fused), packed_source(file, From(fused, rows=(32, 48)))
    assert blocks is not None and part is not None
    assert part.shape == (16, 32) and (part.raw == blocks.raw[32:48]).all()


def test_gpt2_blocks_are_those_of_the_transposed_matrix() -> None:
    file = open_checkpoint(DATA / "gpt2" / "model-q8_0.gguf")
    name = "transformer.h.0.attn.c_attn.weight"  # (32, 96) in the model, (96, 32) in the file
    assert packed_source(file, From(name)) is None
    packed = packed_source(file, From(name, rows=(32, 64), transpose=True))
    assert packed is not None and packed.shape == (32, 32)


def test_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    file = open_checkpoint(tmp_path, load_format="dummy")
    assert file.names() == [] and file.bytes_by_kind() == {}
    with pytest.raises(KeyError):
        file.read("norm.weight", torch.float32)
    one, two, steps = meta_model(), meta_model(), []
    load_weights(one, file, dtype=torch.bfloat16, progress=lambda *step: steps.append(step))
    load_weights(two, file, dtype=torch.bfloat16)
    assert torch.equal(one.q.weight, two.q.weight) and one.q.weight.dtype == torch.bfloat16
    assert not torch.equal(one.q.weight[:2], one.k.weight)
    assert one.out_norm.weight.tolist() == [1, 1, 1, 1] and one.out_norm.weight.dtype == torch.float32
    assert one.counts.tolist() == [0, 0]
    assert one.lm_head.weight is one.embed.weight
    assert steps[-1][0] == steps[-1][1] > 0


def test_dummy_weights_have_the_usual_scale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with torch.device("meta"):
        model = nn.Linear(512, 512)
    load_weights(model, open_checkpoint(tmp_path, load_format="dummy"), dtype=torch.float32)
    assert abs(float(model.weight.detach().std()) - 0.02) < 2e-4
    assert abs(float(model.weight.detach().mean())) < 2e-4


PEAK = """
import resource, sys, torch
from torch import nn
from pathlib import Path
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.load import load_weights

with torch.device("meta"):
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(24576, 1024)
    model.lm_head = nn.Linear(1024, 24576, bias=False)
file = open_checkpoint(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_weights(model, file, dtype=torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_no_second_copy_in_memory(tmp_path: Path) -> None:
    """96 MiB of bf16 parameters from a GGUF file of 192 MiB in F32: mapped pages are dropped once converted."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama")
    for add, value in ((writer.add_embedding_length, 1024), (writer.add_block_count, 1), (writer.add_head_count, 8),
                       (writer.add_feed_forward_length, 64), (writer.add_context_length, 64)):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((24576, 1024), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    run = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / "big.gguf")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    parameters, largest_tensor = 96 * 1024, 96 * 1024  # KiB
    assert int(run.stdout) < parameters + largest_tensor + 32 * 1024
