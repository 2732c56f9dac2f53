"""Passes that want most likely tokens alone: one call, the tokens of the usual way, and left to it where they cannot tell."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import PAGE, Paged, on_native, tokens

from ridgeline import LLM, SamplingParams
from ridgeline.models.base import CausalLM
from ridgeline.native import _native
from ridgeline.native.whole import NativeWhole
from ridgeline.runner import Runner
from tiny_checkpoint import write_checkpoint, write_model

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def whole_of(model: CausalLM) -> NativeWhole:
    assert isinstance(model.whole, NativeWhole)
    return model.whole


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("options", [{"activation_dtype": "int8", "quantization": "int8"}, {"activation_dtype": "float32"}],
                         ids=["pruned", "float32"])
def test_tokens_are_those_of_the_logits(options: dict[str, Any], threads: int, tmp_path: Path) -> None:
    write_model(tmp_path, sharpness=1.0)
    model, _ = on_native(tmp_path, threads=threads, **options)
    whole, paged = whole_of(model), Paged(model)
    prompts = [tokens(n, n) for n in (1, 9, PAGE + 3)]
    expected = paged.logits(prompts).argmax(-1).tolist()
    rows, pages = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // PAGE)
        rows.append((0, prompt, list(range(pages, pages + count)), None, None, None))
        pages += count
    assert whole.argmax(rows, None, paged.view) == expected
    wanted = [0, 4, 5, len(expected) - 1]
    for some in (wanted, wanted[:1]):
        assert whole.argmax(rows, some, paged.view) == [expected[i] for i in some]


def test_one_call_serves_greedy_passes_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt, many sequences and single steps; what else a request may want takes the usual way."""
    llm = LLM(write_checkpoint(tmp_path), backend="native", threads=1, num_pages=64, max_num_batched_tokens=16)
    usual, taken = Runner._execute, list[int]()

    def counting(self: Runner, slices: Any) -> Any:
        taken.append(len(slices))
        return usual(self, slices)

    prompts = [{"prompt_token_ids": tokens(n, n)} for n in (3, 20, 41)]
    fields = [{"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"prompt_logprobs": 1},
              {"temperature": 1.0, "seed": 1}]
    others = [SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **f}) for f in fields]
    expected = [llm.generate(prompts, params) for params in others]
    monkeypatch.setattr(Runner, "_execute", counting)
    greedy = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    assert not taken and all(len(ids) == 12 for ids in greedy)
    assert greedy == [o.outputs[0].token_ids for o in expected[0]]                    # whose logits were all computed
    for params, before in zip(others, expected):
        taken.clear()
        mixed = llm.generate([*prompts, prompts[1]], [*[params] * 3, GREEDY])
        assert taken and [o.outputs[0].token_ids for o in mixed] == [*[o.outputs[0].token_ids for o in before], greedy[1]]


def test_logits_that_are_no_numbers_end_the_request_as_ever(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    llm = LLM(tmp_path, backend="native", threads=1, num_pages=64)
    model = llm.loaded.model
    whole = whole_of(model)
    assert llm.generate([{"prompt_token_ids": [5, 6]}], GREEDY)[0].error is None
    broken = _native.Norm("rms", [float("nan")] * whole.hidden, [], 1e-6)
    whole.model = _native.Model(whole.head.matrix, 1.0, broken)
    for block in model.model.layers:
        whole.model.add(block.mix.block, block.feed.block)
    answer = llm.generate([{"prompt_token_ids": [5, 6]}], GREEDY)[0]
    assert "not a number" in str(answer.error)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, sharpness=1.0)
    model, _ = on_native(tmp_path, activation_dtype="int8", quantization="int8")
    whole, paged = whole_of(model), Paged(model)
    row = (0, tokens(3), [0], None, None, None)
    whole.argmax([row], None, paged.view)
    with pytest.raises(ValueError, match="wanted row"):
        whole.argmax([row], [3], paged.view)
    batch = _native.Batch.of([row], PAGE)
    given = (whole.model, batch, whole.dtype, whole.kv, whole.rope, True, None)

    def head(cols: int) -> _native.Linear:
        return _native.Linear(whole.engine.pack("F32", torch.zeros(8, cols).numpy().view("uint8"), cols), [], "float32")

    with pytest.raises(ValueError, match="another width"):
        whole.engine.best(*given, head(whole.hidden + 32), False)
    with pytest.raises(ValueError, match="split head"):
        whole.engine.best(*given, head(whole.hidden), True)
