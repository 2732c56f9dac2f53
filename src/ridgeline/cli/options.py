"""Flags that several commands share, and what becomes of them. Names as vLLM users know them."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, InvalidParams


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id or a packaged model (gemma3-270m)")


def add_measuring_arguments(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """The engine's flags of commands that measure it; returns `add_argument` of their group."""
    add = parser.add_argument_group("engine").add_argument
    add("--device", metavar="NAME", help="a torch device such as cuda (default cpu)")
    add("--threads", type=int, metavar="N", help="compute threads (default: the cores this process may use)")
    add("--block-size", type=int, metavar="N", help="positions in a cache page (default 16)")
    add("--kv-cache-memory-bytes", type=int, metavar="N", help="memory of the KV cache (default: by the free memory)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="rows of one forward pass (default 512)")
    return add


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of EngineConfig that say which model it is and how large its numbers are."""
    add = parser.add_argument_group("model").add_argument
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--load-format", metavar="FORMAT", help="auto, safetensors, gguf or dummy (random weights from a config.json)")
    add("--backend", metavar="NAME", help="auto, native (C++ kernels on a CPU) or torch")
    add("--strict-native", action="store_true", default=None, help="fail if a layer has no native kernel")
    add("--activation-dtype", metavar="DTYPE", help="int8, bfloat16 or float32 in native matrix products")
    add("--quantization", metavar="TYPE", help="int8 or int4: quantise float weights at load (int4: embeddings and head int8)")
    add("--dtype", metavar="DTYPE", help="of weights and activations: auto (the model's; bfloat16 for GGUF), bfloat16, "
        "float16, float32 or float64")
    add("--kv-cache-dtype", metavar="DTYPE", help="auto (as --dtype), one of the same types, or int8 (half of the memory "
        "and reading of 16 bits)")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output together, in tokens")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of EngineConfig; those not given keep its defaults."""
    add_shape_arguments(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--tokenizer", metavar="PATH", help="folder or file of another tokenizer")
    add("--skip-tokenizer-init", action="store_true", default=None, help="no tokenizer: token ids in, token ids out")
    add("--chat-template", metavar="FILE", help="a chat template that replaces the model's")
    add("--device", metavar="NAME", help="a torch device such as cuda (default cpu)")
    add("--threads", type=int, metavar="N", help="compute threads (default: the cores this process may use)")
    add("--block-size", type=int, metavar="N", help="positions in a cache page (default 16)")
    add("--kv-cache-memory-bytes", type=int, metavar="N",
        help="memory of the KV cache and recurrent states (default: by the free memory)")
    add("--max-num-seqs", type=int, metavar="N", help="sequences that run at once (default 64)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="rows of one forward pass (default 512)")
    add("--max-mixed-prefill-tokens", type=int, metavar="N",
        help="prompt rows of a pass in which other sequences decode (default 128 on a CPU, else no limit)")
    add("--max-logprobs", type=int, metavar="N", help="most log-probabilities that a request may ask for (default 20)")
    add("--scheduling-policy", metavar="NAME", help="fcfs (default), priority or static")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None,
        help="reuse the KV cache of common prefixes (default on)")
    add("--speculative-config", type=json_object, metavar="JSON",
        help='e.g. \'{"method": "ngram", "num_speculative_tokens": 4}\'; methods: ngram, lookup_tree, draft_model, '
             "hidden_drafter (the last two with \"model\")")
    add("--diffusion-config", type=json_object, metavar="JSON",
        help='options of block diffusion, e.g. \'{"block": 4, "threshold": 0.9}\'')


ENGINE_FLAGS = ("backend", "strict_native", "activation_dtype", "quantization", "revision", "load_format", "dtype",
                "kv_cache_dtype", "max_model_len", "tokenizer", "skip_tokenizer_init",
                "device", "threads", "block_size", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
                "max_mixed_prefill_tokens", "max_logprobs", "scheduling_policy", "enable_prefix_caching",
                "speculative_config", "diffusion_config")


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of LLM."""
    found = {name: getattr(options, name) for name in ENGINE_FLAGS if getattr(options, name, None) is not None}
    if getattr(options, "chat_template", None):
        found["chat_template"] = read_text(options.chat_template, "chat template")
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags of SamplingParams; those not given keep its defaults, max_tokens apart."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"tokens to generate (default {max_tokens})")
    add("--min-tokens", type=int, metavar="N", help="tokens before the end of the text is allowed")
    add("--temperature", type=float, metavar="T", help="0: always the most probable token (default 1)")
    add("--top-k", type=int, metavar="K", help="keep the K most probable tokens")
    add("--top-p", type=float, metavar="P", help="keep the smallest set of tokens with this probability")
    add("--min-p", type=float, metavar="P", help="drop tokens less probable than P times the best")
    add("--typical-p", type=float, metavar="P", help="locally typical sampling")
    add("--repetition-penalty", type=float, metavar="R", help="above 1: tokens of prompt and output become less likely")
    add("--presence-penalty", type=float, metavar="P", help="subtracted once from tokens of the output")
    add("--frequency-penalty", type=float, metavar="P", help="subtracted for each occurrence in the output")
    add("--logit-bias", type=json_object, metavar="JSON", help='added to logits, e.g. \'{"42": -5}\'')
    add("--allowed-token-ids", type=int, nargs="+", metavar="ID", help="only these tokens may be chosen")
    add("--bad-words", nargs="+", metavar="WORD", help="never generate these words")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    add("--n", type=int, metavar="N", help="samples of each prompt (default 1)")
    add("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    add("--include-stop-str-in-output", action="store_true", default=None, help="keep the stop text")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end after any of these tokens")
    add("--ignore-eos", action="store_true", default=None, help="go on past the end-of-text token")
    add("--skip-special-tokens", action=argparse.BooleanOptionalAction, default=None,
        help="leave special tokens out of the text (default on)")
    add("--logprobs", type=int, metavar="K", help="log-probabilities of each token and of the K best")
    add("--prompt-logprobs", type=int, metavar="K", help="the same for the tokens of the prompt")
    add("--echo", action="store_true", default=None, help="put the prompt before the answer")
    form = parser.add_argument_group("form of the output", "one of these; the names of vLLM and of llama.cpp").add_argument
    form("-j", "--json-schema", "-jf", "--json-schema-file", metavar="FILE|TEXT",
         help="JSON of this schema; '{}' is any JSON")
    form("--regex", metavar="PATTERN", help="a text that matches from its first character to its last")
    form("--choice", nargs="+", metavar="TEXT", help="one of these texts")
    form("--grammar", "--grammar-file", metavar="FILE|TEXT", help="a text of this grammar, in Lark or GBNF")


SAMPLING_FLAGS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
                  "presence_penalty", "frequency_penalty", "allowed_token_ids", "bad_words", "seed", "n", "stop",
                  "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logprobs",
                  "prompt_logprobs", "echo")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of SamplingParams."""
    found = {name: getattr(options, name) for name in SAMPLING_FLAGS if getattr(options, name, None) is not None}
    if options.logit_bias is not None:
        try:
            found["logit_bias"] = {int(token): bias for token, bias in options.logit_bias.items()}
        except (AttributeError, ValueError) as error:
            raise InvalidParams(f"--logit-bias is {options.logit_bias!r}; it must map token ids to numbers") from error
    form = _form(options)
    if form:
        found["structured_outputs"] = form
    return found


def _form(options: argparse.Namespace) -> dict[str, Any]:
    """The form of the output; SamplingParams says what is wrong with it, and with more than one."""
    form: dict[str, Any] = {}
    if options.json_schema is not None:
        text = options.json_schema
        literal = text.lstrip().startswith(("{", "[")) or text.strip() in ("true", "false")
        form["json"] = text if literal else read_text(text, "JSON schema")
    if options.regex is not None:
        form["regex"] = options.regex
    if options.choice is not None:
        form["choice"] = options.choice
    if options.grammar is not None:                      # every rule has a colon; few names of files do
        text = options.grammar
        form["grammar"] = text if ":" in text and not _is_file(text) else read_text(text, "grammar")
    return form


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):                        # longer than a name can be, or with a NUL
        return False


def read_text(path: str, what: str) -> str:
    """A whole UTF-8 file. raises ConfigError that names the file."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{what} file {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(not_utf8(f"{what} file {path!r}", error)) from error


def not_utf8(what: str, error: UnicodeDecodeError) -> str:
    return f"{what} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def json_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value
