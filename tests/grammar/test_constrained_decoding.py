"""Outputs that follow a grammar: alone, in mixed batches, under speculation and preemption, in several samples."""
from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import PERSON, SCHEMAS

from ridgeline import LLM, SamplingParams
from ridgeline.errors import EngineError, InvalidParams
from ridgeline.types import RequestOutput
from tiny_checkpoint import write_checkpoint

FORMS: list[dict[str, Any]] = [
    *({"json": schema} for schema in SCHEMAS),
    {"regex": "[a-c]{3}-\u6d77[0-9]{2}"}, {"choice": ["calm", "\u6d77", "calm light"]},
    {"grammar": 'start: word (" " word){2}\nword: "sea" | "light" | "\u00dcn\u00efc\u00f6d\u00e9"'},
]


def params(form: dict[str, Any] | None, **more: Any) -> SamplingParams:
    if form is not None and "json" in form:
        form = {**form, "whitespace_pattern": " "}        # a random model would fill its limit with blanks
    return SamplingParams(**{"max_tokens": 150, "structured_outputs": form, **more})


def valid(form: dict[str, Any], text: str) -> bool:
    if "json" in form:
        return jsonschema.Draft202012Validator(form["json"]).is_valid(json.loads(text))
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    return len(text.split(" ")) == 3 and set(text.split(" ")) <= {"sea", "light", "\u00dcn\u00efc\u00f6d\u00e9"}


def check(outputs: list[RequestOutput], forms: list[dict[str, Any] | None]) -> None:
    for output, form in zip(outputs, forms):
        assert output.error is None
        for sample in output.outputs:
            if form is not None:
                assert sample.finish_reason == "stop", (form, sample.text)
                assert valid(form, sample.text), (form, sample.text)


def prompts(count: int) -> list[str]:
    return [f"The sea {i} and the light, calm calm calm, the sea" for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_form_in_one_batch_with_free_rows(llm: LLM, temperature: float) -> None:
    forms = [form for pair in zip(FORMS, [None] * len(FORMS)) for form in pair]
    wanted = [params(form, temperature=temperature, seed=i, max_tokens=150 if form else 12) for i, form in enumerate(forms)]
    outputs = llm.generate(prompts(len(forms)), wanted)
    check(outputs, forms)
    free = [i for i, form in enumerate(forms) if form is None]
    alone = llm.generate([prompts(len(forms))[i] for i in free], [wanted[i] for i in free])
    assert [outputs[i].outputs[0].token_ids for i in free] == [o.outputs[0].token_ids for o in alone]


def test_speculation_changes_nothing(llm: LLM, looking_up: LLM) -> None:
    for temperature in (0.0, 1.5):
        wanted = [params(form, temperature=temperature, seed=7) for form in FORMS]
        before = looking_up.engine.stats.accepted_tokens
        plain, fast = (engine.generate(prompts(len(FORMS)), wanted) for engine in (llm, looking_up))
        check(fast, [*FORMS])
        assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in fast]
        assert looking_up.engine.stats.draft_tokens > 0
    assert looking_up.engine.stats.accepted_tokens > before


@pytest.mark.parametrize("speculative", [{}, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "ngram"])
def test_shortcuts_of_the_native_head_do_not_pass_the_grammar_by(tiny: Path, speculative: dict[str, Any]) -> None:
    """Greedy and top-k rows of an 8-bit head may be chosen without all logits being written: with a grammar, only the most
    likely token of all, if it is allowed."""
    native = LLM(tiny, threads=1, backend="native", quantization="int8", speculative_config=speculative)
    for more in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_k": 5, "min_p": 0.01}):
        forms = [form for pair in zip(FORMS, [None] * len(FORMS)) for form in pair]
        wanted = [params(form, seed=i, **more, max_tokens=150 if form else 12) for i, form in enumerate(forms)]
        short = native.generate(prompts(len(forms)), wanted)
        check(short, forms)
        model = native.engine.runners["target"].model
        head, model.top_head = model.top_head, None
        assert head is not None
        whole = native.generate(prompts(len(forms)), wanted)
        model.top_head = head
        assert [o.outputs[0].token_ids for o in short] == [o.outputs[0].token_ids for o in whole]


@pytest.mark.parametrize("config", [
    {"method": "lookup_tree"}, {"method": "draft_model", "num_speculative_tokens": 3}], ids=lambda c: str(c["method"]))
def test_trees_and_sampled_drafts_obey(tiny: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    if config["method"] == "draft_model":
        config = {**config, "model": str(write_checkpoint(tmp_path / "draft", seed=1, max_position_embeddings=512))}
    engine = LLM(tiny, threads=1, backend="torch", speculative_config=config)
    for temperature in (0.0, 1.5):
        check(engine.generate(prompts(len(FORMS)), [params(f, temperature=temperature, seed=3) for f in FORMS]), [*FORMS])
    assert engine.engine.stats.draft_tokens > 0


def test_samples_have_their_own_state_and_preemption_keeps_it(tiny: Path, llm: LLM) -> None:
    wanted = params({"json": PERSON}, temperature=1.5, seed=11, n=4)
    whole = llm.generate("The sea", wanted)[0]
    check([whole], [{"json": PERSON}])
    assert len({sample.text for sample in whole.outputs}) > 1
    small = LLM(tiny, threads=1, backend="torch", max_num_seqs=4, num_pages=10, max_model_len=150, enable_prefix_caching=False)
    tight = small.generate("The sea", wanted)[0]
    assert small.engine.stats.preemptions > 0
    assert [s.token_ids for s in tight.outputs] == [s.token_ids for s in whole.outputs]


def test_logprobs_are_of_the_tokens_chosen(llm: LLM) -> None:
    output = llm.generate("The sea", params({"choice": ["calm"]}, temperature=0.0, logprobs=1))[0].outputs[0]
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert output.text == "calm"


def test_the_limit_cuts_an_output_off(llm: LLM) -> None:
    output = llm.generate("The sea", params({"regex": "a{200}"}, max_tokens=5))[0].outputs[0]
    assert output.finish_reason == "length" and set(output.text) == {"a"}


def test_a_refused_grammar_fails_alone(llm: LLM) -> None:
    good, bad, free = llm.generate(["The sea"] * 3, [
        params({"choice": ["calm"]}), params({"regex": "a{2"}), params(None, max_tokens=3)])
    assert isinstance(bad.error, InvalidParams) and "unclosed counted repetition" in str(bad.error)
    assert good.outputs[0].text == "calm" and free.error is None


def test_a_grammar_that_fails_while_it_is_followed_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives up on grammars that become too complex; that is one request's end."""
    from ridgeline.grammar.matcher import LLState

    follow = LLState.mask

    def limited(self: LLState, output: list[int]) -> Any:
        if len(output) == 2 and self._words and output[0] in llm.frontend.tokenizer.encode("x", add_special_tokens=False):
            raise EngineError("structured_outputs: the grammar cannot be followed any further")
        return follow(self, output)

    monkeypatch.setattr(LLState, "mask", limited)
    good, bad = llm.generate(["The sea"] * 2, [params({"choice": ["calm light"]}), params({"regex": "xxxxxx"})])
    assert isinstance(bad.error, EngineError) and "any further" in str(bad.error)
    assert good.outputs[0].text == "calm light"


def test_masks_that_leave_nothing_are_an_error_of_the_request(llm: LLM) -> None:
    output = llm.generate("The sea", params({"choice": ["calm"]}, allowed_token_ids=[5]))[0]
    assert isinstance(output.error, InvalidParams) and "exclude every token" in str(output.error)


def test_scoring_needs_no_grammar(llm: LLM) -> None:
    assert llm.generate("The sea", params({"regex": "a"}, max_tokens=0, echo=True))[0].error is None


def test_block_diffusion_has_no_grammar(tmp_path: Path) -> None:
    blocks = LLM(write_checkpoint(tmp_path / "blocks", model_type="sdar"), threads=1, backend="torch",
                 diffusion_config={"mask_token": 5})
    output = blocks.generate("The sea", params({"regex": "a"}))[0]
    assert isinstance(output.error, InvalidParams) and "left to right" in str(output.error)


def test_a_model_without_a_tokenizer_has_no_grammar(tiny: Path) -> None:
    bare = LLM(tiny, threads=1, backend="torch", skip_tokenizer_init=True)
    output = bare.generate([[5, 6]], replace(params({"regex": "a"}), detokenize=False))[0]
    assert isinstance(output.error, InvalidParams) and "tokenizer" in str(output.error)
