"""Tokenizers of model folders in the Hugging Face layout.

    tokenizer.json                       everything; otherwise
    vocab.json + merges.txt              byte-level BPE (GPT-2's files), or
    tokenizer.model                      a SentencePiece model
    tokenizer_config.json                named tokens, add_bos_token / add_eos_token, added tokens, chat template
    special_tokens_map.json, added_tokens.json     the same in older folders
    chat_template.jinja, chat_template.json, additional_chat_templates/*.jinja
    generation_config.json, config.json  further end-of-sequence ids
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ridgeline.errors import CorruptFile, ModelNotFound
from ridgeline.text.pretokenizers import pre_tokenizer
from ridgeline.text.sentencepiece import backend as sentencepiece_backend
from ridgeline.text.sentencepiece import read_model
from ridgeline.text.tokenizer import Tokenizer, wrap_with

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Which pre-tokenizer vocab.json + merges.txt go with; the files themselves do not say.
_PRE_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def load_folder_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder, or of one of its tokenizer files.

    Raises ModelNotFound, listing the file names looked for, if there is none and CorruptFile for a damaged one.
    """
    if not path.exists():
        raise ModelNotFound(f"{path}: no such folder or tokenizer file")
    folder = path if path.is_dir() else path.parent
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    file = _find(path, folder)
    backend, defaults = _load_backend(file, config)
    backend.no_truncation()
    backend.no_padding()
    named = defaults | {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    special = [*named.values(), *_role_tokens(config)]
    _add_missing(backend, folder, config, special)

    bos = _id_of(backend, named.get("bos_token"))
    eos = _id_of(backend, named.get("eos_token"))
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    # A tokenizer.json says itself what it puts around a text; as in transformers, the flags are for the other forms.
    if file.name in ("vocab.json", "tokenizer.model") and (add_bos is not None or add_eos is not None):
        wrap_with(backend, bos if add_bos else None, eos if add_eos else None)
    ends = [] if eos is None else [eos]
    for name in ("generation_config.json", "config.json"):
        ends += _ids(folder / name, _read_json(folder / name).get("eos_token_id"))
    return Tokenizer(backend, bos_token_id=bos, eos_token_ids=tuple(dict.fromkeys(ends)), named_tokens=named,
                     chat_templates=dict(_chat_templates(folder, config)), also_special=special, source=str(path))


def _find(path: Path, folder: Path) -> Path:
    """The file that holds the vocabulary."""
    for name in [path.name] if path.is_file() else ["tokenizer.json", "vocab.json", "tokenizer.model"]:
        file = folder / name
        if file.is_file() and file.suffix in (".json", ".model"):
            return file
    raise ModelNotFound(f"{path}: no tokenizer; looked for tokenizer.json, vocab.json with merges.txt, "
                        "tokenizer.model or a .gguf file")


def _load_backend(file: Path, config: Mapping[str, Any]) -> tuple[Backend, dict[str, str]]:
    """The backend, and the named tokens that the vocabulary file itself implies."""
    if file.suffix == ".model":
        return _sentencepiece(file)
    if file.name == "vocab.json":
        return _byte_level(file, file.parent / "merges.txt", str(config.get("tokenizer_class", ""))), {}
    return _checked(file, partial(Backend.from_file, str(file))), {}


def _checked(file: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise CorruptFile(f"{file}: not a tokenizer: {error}") from error


def _byte_level(vocab: Path, merges: Path, tokenizer_class: str) -> Backend:
    if not merges.is_file():
        raise ModelNotFound(f"{merges}: missing; {vocab.name} needs it")
    backend = Backend(_checked(vocab, lambda: models.BPE.from_file(str(vocab), str(merges))))
    name = _PRE_OF_CLASS.get(tokenizer_class.removesuffix("Fast"), "gpt-2")
    backend.pre_tokenizer = pre_tokenizer(name, str(vocab)).build()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: Path) -> tuple[Backend, dict[str, str]]:
    pieces = read_model(file)
    backend = sentencepiece_backend(pieces)
    ids = {"unk_token": pieces.unk_id, "bos_token": pieces.bos_id, "eos_token": pieces.eos_id}
    wrap_with(backend, pieces.bos_id, None)
    return backend, {name: pieces.tokens[index] for name, index in ids.items() if index is not None}


def _role_tokens(config: Mapping[str, Any]) -> list[str]:
    """Special tokens to which a model gives roles of its own (image_token, ...)."""
    extra = config.get("extra_special_tokens")
    values = extra.values() if isinstance(extra, Mapping) else ()
    return [text for value in values if (text := _content(value)) is not None]


def _listed_tokens(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without a role. One that the vocabulary file flags as plain stays plain, as in transformers."""
    extra = config.get("extra_special_tokens")
    listed = [*(extra if isinstance(extra, list) else ()), *(config.get("additional_special_tokens") or ())]
    return [text for value in listed if (text := _content(value)) is not None]


def _add_missing(backend: Backend, folder: Path, config: Mapping[str, Any], special: list[str]) -> None:
    """Register the tokens that the configuration declares beside the vocabulary file."""
    listed = _listed_tokens(config)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = {index: token for index, token in _declared(folder, config, listed) if token.content not in known}
    backend.add_tokens(list(declared.values()))
    for index, token in declared.items():
        found = backend.token_to_id(token.content)
        if found != index:
            raise CorruptFile(f"{folder}: token {token.content!r} is declared with id {index}, but the vocabulary "
                              f"gives it id {found}; ids must be without gaps")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    unflagged = [text for text in listed if text not in known]
    backend.add_special_tokens([
        AddedToken(text, normalized=False, special=True) for text in [*special, *unflagged]
        if backend.token_to_id(text) is not None
    ])


def _declared(folder: Path, config: Mapping[str, Any], listed: list[str]) -> Iterator[tuple[int, AddedToken]]:
    """The (id, token) pairs of added_tokens_decoder or, in older folders, added_tokens.json, in order of id."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for index, entry in sorted(decoder.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1):
            text = _content(entry)
            if text is None or not isinstance(entry, Mapping) or not index.isdecimal():
                raise CorruptFile(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder[{index!r}] is {entry!r}; "
                                  "expected an id and an object with content")
            flags = {flag: bool(entry.get(flag, False))
                     for flag in ("lstrip", "rstrip", "single_word", "special", "normalized")}
            yield int(index), AddedToken(text, **flags)
        return
    older = _read_json(folder / "added_tokens.json")
    if not all(isinstance(index, int) for index in older.values()):
        raise CorruptFile(f"{folder / 'added_tokens.json'}: expected token texts with integer ids")
    for text, index in sorted(older.items(), key=lambda item: item[1]):
        yield index, AddedToken(text, normalized=False, special=text in listed)  # the lists are all the flags there are


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Later ones replace earlier ones of the same name: files of their own win over tokenizer_config.json."""
    for stored in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(stored, str):
            yield "default", stored
        elif isinstance(stored, list):
            for entry in stored:
                if not isinstance(entry, Mapping) or not {"name", "template"} <= set(entry):
                    raise CorruptFile(f"{folder}: chat_template: expected objects with name and template")
                yield str(entry["name"]), str(entry["template"])
    for file in [*sorted((folder / "additional_chat_templates").glob("*.jinja")), folder / "chat_template.jinja"]:
        if file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CorruptFile(f"{file}: not valid UTF-8: {error.reason} at byte {error.start}") from error
            yield "default" if file.name == "chat_template.jinja" else file.stem, text


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise CorruptFile(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A token is written as its text or as an object with its text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(file: Path, value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise CorruptFile(f"{file}: eos_token_id is {value!r}; expected an integer or a list of integers")
    return values
