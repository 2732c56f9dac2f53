from __future__ import annotations

import dataclasses

import pytest

from ridgeline.analysis.spec import Attention, Layer, Matrix, Mlp, Part, Spec
from ridgeline.analysis.work import Rows
from ridgeline.bench.limits import Shape
from ridgeline.bench.machine import Machine
from ridgeline.bench.work import parse_work
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.loading import describe

MACHINE = Machine("test", 1, 1, None, bandwidth=1000.0, peak=1e6, peak_of="", torch="", python="", ridgeline="", load=0.0)


def layer(window: int | None) -> Layer:
    """50 parameters in 30 bytes; two heads over one KV head of 4."""
    q, k, o = Matrix(8, 2, "q8_0", 9), Matrix(4, 2, "q8_0", 5), Matrix(2, 8, "q8_0", 9)
    mixer = Attention(q, k, k, o, heads=2, kv_heads=1, head_dim=4, window=window)
    return Layer(Part(mixer), Part(Mlp(Matrix(1, 1, "f32", 1), Matrix(1, 1, "f32", 1))))


SHAPE = Shape(Spec("test", hidden=2, vocab=25, layers=(layer(None), layer(3)), embed=Matrix(25, 2, "q8_0", 40),
                   head=Matrix(25, 2, "q8_0", 40), tied=False, kv_dtype="bfloat16"))


def test_bytes_of_a_pass():
    """8 elements of 2 bytes a token and layer; the window of 3 sees 3 of 11 keys."""
    assert (SHAPE.layer_parameters, SHAPE.layer_bytes) == (100, 60)
    assert SHAPE.bytes_read([Rows(10, 1, 1)]) == 60 + 40 + 16 * 11 + 16 * 3
    eight = Shape(dataclasses.replace(SHAPE.spec, kv_dtype="int8"))           # and two scales of 4 bytes for the one head
    assert eight.bytes_read([Rows(10, 1, 1)]) == 60 + 40 + (8 + 8) * 11 + (8 + 8) * 3
    assert SHAPE.bytes_read([Rows(0, 5, 0)]) == 60 + 16 * 5 + 16 * 5          # no row needs the head
    both = SHAPE.bytes_read([Rows(10, 1, 1), Rows(10, 1, 1)])
    assert both == 60 + 40 + 2 * (16 * 11 + 16 * 3)                           # weights once, keys of each sequence


def test_operations_of_a_pass():
    """Two a multiply-add: 2 heads x (4 + 4) wide for each key that is seen."""
    assert SHAPE.operations([Rows(10, 1, 1)]) == 2 * 100 + 2 * 50 + 32 * 11 + 32 * 3
    assert SHAPE.operations([Rows(0, 2, 0)]) == 2 * 2 * 100 + 32 * 3 + 32 * 3
    assert SHAPE.operations([]) == SHAPE.bytes_read([]) == 0


def test_each_pass_takes_the_longer_of_reading_and_computing():
    read, computed = [Rows(10, 1, 1)], [Rows(0, 2000, 1)]
    seconds = [SHAPE.seconds([p], MACHINE) for p in (read, computed)]
    assert seconds == [SHAPE.bytes_read(read) / 1000, SHAPE.operations(computed) / 1e6]
    assert SHAPE.seconds([read, computed], MACHINE) == pytest.approx(sum(seconds))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_loaded_model(model, backend, tied):
    """Matrices of the tiny Llama: q, o 2 x 64 x 64, k, v 2 x 32 x 64, gate, up, down 3 x 96 x 64, in two layers."""
    name, options = model(tie_word_embeddings=tied), {"load_format": "dummy", "backend": backend, "dtype": "bfloat16"}
    llm = LLM(name, max_model_len=64, **options)
    config = EngineConfig.of({**options, "progress": False})
    shape = Shape.of(llm.loaded, describe(name, config), config)
    layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert (shape.layer_parameters, shape.spec.head.parameters) == (layers, 512 * 64)
    assert (shape.layer_bytes, shape.spec.head.nbytes) == (2 * layers, 2 * 512 * 64)
    assert [(a.kv_heads, a.head_dim, a.window) for a in shape.spec.attention_layers()] == [(2, 16, None)] * 2
    assert shape.spec.kv_dtype == "bfloat16"


def test_quantised_weights_count_as_they_are_stored(model):
    name, options = model(), {"load_format": "dummy", "backend": "native", "quantization": "int8"}
    llm = LLM(name, max_model_len=64, **options)
    config = EngineConfig.of({**options, "progress": False})
    shape = Shape.of(llm.loaded, describe(name, config), config)
    per_weight = shape.layer_bytes / shape.layer_parameters
    assert 1 + 2 / 32 <= per_weight <= 1 + 4 / 32 + 0.01        # a byte, and a scale for 32


def test_work_names():
    pp, tg, behind, batch = parse_work("pp512, tg64,tg32@4096,d8")
    assert (pp.sequences, pp.prompt_len, pp.steps) == (1, 512, 0)
    assert (tg.sequences, tg.prompt_len, tg.steps) == (1, None, 64)
    assert (behind.prompt_len, behind.steps, behind.positions(512)) == (4096, 32, 4129)
    assert (batch.sequences, batch.prompt_len, batch.steps) == (8, 128, 48)


@pytest.mark.parametrize("text", ["", "pp", "pp0", "d8@9", "pp8,", "tg-1", "prefill", "tg1@0", "pp99999999"])
def test_other_names_are_refused_with_the_valid_ones(text):
    with pytest.raises(ConfigError, match=r"valid: ppN .*tgN@C.*dN"):
        parse_work(text)
