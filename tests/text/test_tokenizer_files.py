"""Loading tokenizers from files of every form, and what damaged or missing ones say."""
from __future__ import annotations

import json
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from ridgeline.errors import CorruptFile, InvalidPrompt, ModelNotFound, UnsupportedModel
from ridgeline.text.build_cache import cache_folder
from ridgeline.text.gguf_tokenizer import tokenizer_from_metadata
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.weights.gguf_file import GGUFFile

TEXT = "def f(x): return 12345  # it's déjà vu 今天"


def metadata_of(name: str, data: Path, **changes: Any) -> dict[str, Any]:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GGUFFile(data / f"{name}.gguf").metadata | changed


@pytest.fixture
def vocab_merges(tmp_path: Path) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.model.save(str(tmp_path))
    return tmp_path


# Folders


def test_vocab_and_merges(vocab_merges: Path) -> None:
    tokenizer = load_tokenizer(vocab_merges)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_ids == ()
    digits = next(index for index in tokenizer.encode(TEXT) if tokenizer.token_text(index).strip()[:1] == "1")
    assert len(tokenizer.token_text(digits)) > 1  # GPT-2 keeps numbers together ...
    (vocab_merges / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    pieces = [load_tokenizer(vocab_merges).token_text(index) for index in load_tokenizer(vocab_merges).encode("12345")]
    assert pieces == list("12345")  # ... Qwen2 cuts them into digits


def test_tokens_declared_beside_the_vocabulary(vocab_merges: Path) -> None:
    size = load_tokenizer(vocab_merges).vocab_size
    (vocab_merges / "added_tokens.json").write_text(json.dumps({"<b>": size + 1, "<a>": size}))
    (vocab_merges / "special_tokens_map.json").write_text(json.dumps({
        "eos_token": "<a>", "additional_special_tokens": ["<b>"]}))
    tokenizer = load_tokenizer(vocab_merges)
    assert tokenizer.encode("x<b><a>")[-2:] == [size + 1, size]
    assert tokenizer.special_tokens == {"<a>": size, "<b>": size + 1}
    assert tokenizer.eos_token_ids == (size,)
    assert tokenizer.named_tokens == {"eos_token": "<a>"}


def test_added_tokens_decoder_and_its_flags(vocab_merges: Path) -> None:
    size = load_tokenizer(vocab_merges).vocab_size
    config: dict[str, Any] = {"added_tokens_decoder": {
        str(size): {"content": "<mask>", "special": True, "lstrip": True}, str(size + 1): {"content": "<tool>"}}}
    (vocab_merges / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(vocab_merges)
    assert tokenizer.decode(tokenizer.encode("x <mask><tool>"), skip_special_tokens=False) == "x<mask><tool>"
    assert tokenizer.special_tokens == {"<mask>": size}
    config["added_tokens_decoder"] = {str(size + 7): {"content": "<gap>"}}
    (vocab_merges / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFile, match=f"'<gap>' is declared with id {size + 7}, but .* gives it id {size};"):
        load_tokenizer(vocab_merges)


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_add_bos_and_eos(vocab_merges: Path, bos: bool | None, eos: bool | None) -> None:
    config = {"bos_token": "d", "eos_token": "v", "add_bos_token": bos, "add_eos_token": eos}
    (vocab_merges / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(vocab_merges)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_ids[0]
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.encode("x") == [*([first] if bos else []), *plain, *([last] if eos else [])]


def test_end_ids_of_the_generation_config(vocab_merges: Path) -> None:
    (vocab_merges / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (vocab_merges / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(vocab_merges).eos_token_ids == (7, 5)
    (vocab_merges / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CorruptFile, match=r"generation_config\.json: eos_token_id is 'x'"):
        load_tokenizer(vocab_merges)


def test_where_chat_templates_come_from(vocab_merges: Path) -> None:
    config = vocab_merges / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "in the config"}))
    assert load_tokenizer(vocab_merges).chat_template == "in the config"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(vocab_merges).chat_templates == {"default": "a", "tool_use": "b"}
    config.write_text('{"chat_template": [{"name": "default"}]}')
    with pytest.raises(CorruptFile, match="expected objects with name and template"):
        load_tokenizer(vocab_merges)
    config.write_text(json.dumps({"chat_template": named}))
    (vocab_merges / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert load_tokenizer(vocab_merges).chat_template == "in json"
    (vocab_merges / "chat_template.jinja").write_text("in jinja")
    assert load_tokenizer(vocab_merges).chat_template == "in jinja"


def test_override_and_single_files(vocab_merges: Path, data: Path) -> None:
    tokenizer = load_tokenizer(vocab_merges / "nowhere", override=str(data / "spm.gguf"))
    assert tokenizer.special_tokens["<s>"] == 1
    tokenizer._backend.save(str(vocab_merges / "tokenizer.json"))
    assert load_tokenizer(vocab_merges / "tokenizer.json").special_tokens["<s>"] == 1


def test_missing_files(tmp_path: Path, vocab_merges: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelNotFound, match=r"absent\.gguf"):
        load_tokenizer(tmp_path / "absent.gguf")
    (vocab_merges / "merges.txt").unlink()
    with pytest.raises(ModelNotFound, match=r"merges\.txt: missing"):
        load_tokenizer(vocab_merges)
    (vocab_merges / "vocab.json").unlink()
    with pytest.raises(ModelNotFound, match=r"looked for tokenizer\.json"):
        load_tokenizer(vocab_merges)


@pytest.mark.parametrize("name, content", [
    ("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("vocab.json", "[1"), ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"), ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}'), ("added_tokens.json", '{"a": "b", "c": 1}'),
    ("special_tokens_map.json", "\udcff"), ("chat_template.jinja", "\udcff"),
])
def test_damaged_files_are_named(vocab_merges: Path, name: str, content: str) -> None:
    (vocab_merges / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptFile, match=name):
        load_tokenizer(vocab_merges)


# SentencePiece


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A protobuf message: ints as varints, floats as 32 bits, bytes with their length."""
    def varint(value: int) -> bytes:
        value &= (1 << 64) - 1
        result = b""
        while value >= 0x80:
            result += bytes([value & 0x7F | 0x80])
            value >>= 7
        return result + bytes([value])

    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def sentencepiece_model(data: Path, kind: int = 2, *normalizer: tuple[int, int | float | bytes]) -> bytes:
    metadata = GGUFFile(data / "spm.gguf").metadata
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    pieces = [(1, message((1, token.encode()), (2, float(score)), (3, int(code))))
              for token, score, code in zip(*columns)]
    trainer = message((3, kind), (40, 0), (41, 1), (42, 2), (43, -1), (44, b"<unk>"))
    return message(*pieces, (2, trainer), (3, message((1, b"identity"), *normalizer)))


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_model(
    tmp_path: Path, data: Path, spm: Tokenizer, spm_without_prefix: Tokenizer, prefix: bool
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(data, 2, (3, int(prefix))))
    tokenizer = load_tokenizer(tmp_path)
    expected = spm if prefix else spm_without_prefix
    texts = json.loads((data / "strings.json").read_text(encoding="utf-8"))["spm"]
    assert [tokenizer.encode(text) for text in texts] == [expected.encode(text) for text in texts]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert load_tokenizer(tmp_path).encode("a") == [*tokenizer.encode("a")[1:], 2]


def test_bad_tokenizer_models(tmp_path: Path, data: Path) -> None:
    file = tmp_path / "tokenizer.model"
    whole = sentencepiece_model(data)
    for damaged in (whole[:1000], b"", b"\xff" * 40, b"not a model at all", message((2, message((3, 2))))):
        file.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"tokenizer\.model: not a SentencePiece model"):
            load_tokenizer(tmp_path)
    file.write_bytes(sentencepiece_model(data, 1))
    with pytest.raises(UnsupportedModel, match="'unigram'; supported: 'bpe'"):
        load_tokenizer(tmp_path)
    file.write_bytes(sentencepiece_model(data, 2, (2, b"map")))
    with pytest.raises(UnsupportedModel, match="character map"):
        load_tokenizer(tmp_path)


# GGUF


def test_gguf_defaults_and_flags(data: Path, spm: Tokenizer, bpe: Tokenizer) -> None:
    assert (spm.bos_token_id, spm.eos_token_ids) == (1, (2,))
    assert spm.encode("") == [1]
    ends = {bpe.token_text(index) for index in bpe.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}
    assert bpe.named_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert bpe.encode("") == []
    both = tokenizer_from_metadata(metadata_of("bpe", data, add_bos_token=True, add_eos_token=True), "x")
    assert both.encode("") == [both.bos_token_id, both.special_tokens["<|im_end|>"]]
    assert both.encode("", add_special_tokens=False) == []
    neither = tokenizer_from_metadata(metadata_of("spm", data, add_bos_token=False), "x")
    assert neither.encode("") == []


def test_gguf_chat_templates(data: Path) -> None:
    metadata = metadata_of("bpe", data) | {
        "tokenizer.chat_template": "main", "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools"}
    assert tokenizer_from_metadata(metadata, "x").chat_templates == {"default": "main", "tool_use": "tools"}


def test_phi3_special_tokens_swallow_spaces(data: Path) -> None:
    metadata = metadata_of("spm", data) | {"general.name": "Phi-3 mini"}
    tokenizer = tokenizer_from_metadata(metadata, "x")
    assert tokenizer.encode("<start>  a") == tokenizer.encode("<start>a")
    assert tokenizer.encode("<s>  a") != tokenizer.encode("<s>a")


def test_text_cannot_spell_a_control_token(data: Path) -> None:
    metadata = metadata_of("spm", data, add_space_prefix=False)
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"].copy()
    control = tokens.index("he")
    assert control in tokenizer_from_metadata(metadata, "x").encode("he", parse_special=False)
    types[control] = 3
    tokenizer = tokenizer_from_metadata(metadata | {"tokenizer.ggml.token_type": types}, "x")
    assert control not in tokenizer.encode("he", parse_special=False)
    assert control in tokenizer.encode("he")


def test_bpe_merges_cannot_spell_a_control_token(data: Path) -> None:
    metadata = metadata_of("bpe", data)
    control = metadata["tokenizer.ggml.tokens"].index("he")
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[control] = 3
    assert tokenizer_from_metadata(metadata, "x").encode("he", parse_special=False) == [control]
    tokenizer = tokenizer_from_metadata(metadata | {"tokenizer.ggml.token_type": types}, "x")
    assert tokenizer.decode(tokenizer.encode("he", parse_special=False)) == "he"
    assert tokenizer.encode("he") == [control]


def test_gemma4_form(data: Path, spm_without_prefix: Tokenizer) -> None:
    from ridgeline.text.sentencepiece import Pieces, merge_table

    metadata = metadata_of("spm", data)
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    tokens = columns[0]
    merges = [f"{tokens[left]} {tokens[right]}" for left, right in merge_table(Pieces(*columns, "x"))]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    tokenizer = tokenizer_from_metadata(metadata, "x")
    for text in ("The river  bends", TEXT, "a\nb\n\nc"):
        assert tokenizer.encode(text) == spm_without_prefix.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name, changes, error, words", [
    ("bpe", {"pre": "unheard-of"}, UnsupportedModel, r"pre is 'unheard-of', which is not known; known: .*qwen2"),
    ("bpe", {"model": "bert"}, UnsupportedModel, "model is 'bert'; supported: llama, gpt2, gemma4"),
    ("bpe", {"model": None}, CorruptFile, "the file holds no tokenizer"),
    ("bpe", {"model": 3}, CorruptFile, "model: expected a string, found int"),
    ("bpe", {"pre": ["gpt-2"]}, CorruptFile, "pre: expected a string, found list"),
    ("bpe", {"merges": None}, CorruptFile, "merges: expected a list of strings, it is missing"),
    ("bpe", {"merges": ["x yzw"]}, CorruptFile, "'x yzw' does not join two tokens"),
    ("bpe", {"tokens": ["a", "b", "a"]}, CorruptFile, "'a' occurs more than once"),
    ("bpe", {"tokens": [1, 2]}, CorruptFile, "expected a list of strings, found list"),
    ("bpe", {"tokens": ["a", "\udcff"]}, CorruptFile, r"tokens\[1\] is not valid UTF-8"),
    ("bpe", {"token_type": [1, 1]}, CorruptFile, r"token_type: expected at least \d+ numbers, found shape \(2,\)"),
    ("spm", {"scores": None}, CorruptFile, "scores: it is missing"),
    ("spm", {"scores": ["a"]}, CorruptFile, "scores: expected at least"),
])
def test_bad_gguf_metadata(data: Path, name: str, changes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        tokenizer_from_metadata(metadata_of(name, data, **changes), "model.gguf")
    assert str(caught.value).startswith("model.gguf: ")


# The cache of merge tables


def test_a_merge_table_is_stored_and_a_damaged_one_made_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = load_tokenizer(data / "spm.gguf").encode(TEXT)
    (stored,) = cache_folder().iterdir()
    intact = stored.read_bytes()
    for damaged in (b"", intact[:-10], intact[:40] + b"x" + intact[41:], b"garbage"):
        stored.write_bytes(damaged)
        assert load_tokenizer(data / "spm.gguf").encode(TEXT) == expected
        assert stored.read_bytes() == intact
    assert list(cache_folder().iterdir()) == [stored]
    changed = metadata_of("spm", data)["tokenizer.ggml.scores"][::-1].copy()
    tokenizer_from_metadata(metadata_of("spm", data, scores=changed), "x")
    assert len(list(cache_folder().iterdir())) == 2


def test_the_stored_table_is_used(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = load_tokenizer(data / "spm.gguf").encode(TEXT)
    monkeypatch.setattr("ridgeline.text.sentencepiece.merge_table", None)  # building would fail now
    assert load_tokenizer(data / "spm.gguf").encode(TEXT) == expected


def test_an_unusable_cache_folder_does_not_matter(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ridgeline").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_tokenizer(data / "spm.gguf").encode("a")
    shutil.rmtree(tmp_path)
    assert load_tokenizer(data / "spm.gguf").encode("a")


# Prompts


@pytest.mark.parametrize("prompt, words", [
    ("ab\ud800c", r"lone surrogate U\+D800 at character 2"), (b"bytes", "is bytes; expected str"),
    (None, "is NoneType"), ([1, 2], "is list"),
])
def test_invalid_prompts(bpe: Tokenizer, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        bpe.encode(prompt)


def test_threads_do_not_disturb_each_other(bpe: Tokenizer) -> None:
    text = "x<|im_end|>y " * 20
    expected = {flag: bpe.encode(text, parse_special=flag) for flag in (True, False)}
    assert expected[True] != expected[False]
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(200) if bpe.encode(text, parse_special=flag) != expected[flag])

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
