"""`ridgeline chat`, `info`, `perplexity`, and the command itself as a process."""
from __future__ import annotations

import builtins
import io
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.cli import COMMANDS
from ridgeline.native._native import available
from ridgeline.quality import Quality, measure, windows
from ridgeline.types import Recurrent
from tiny_checkpoint import TEXT, write_model

ONE_LINE = "The sea is calm and 海は静かで 🙂. " * 6


# chat


def test_chat_from_a_pipe_keeps_the_conversation(run: Any, folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    first = llm.chat([{"role": "user", "content": "海"}], params)[0].outputs[0].text
    both = [{"role": "user", "content": "海"}, {"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    second = llm.chat(both, params)[0].outputs[0].text
    flags = ("--temperature", 0, "--max-tokens", 5, "--threads", 1)
    ran = run("chat", folder, *flags, stdin="海\n\nb\n/reset\n海\n/exit\nnever\n".encode())
    assert (ran.code, ran.out, ran.err) == (0, f"{first}\n{second}\n{first}\n", "")
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    ran = run("chat", folder, *flags, "--chat-template", tmp_path / "t.jinja", stdin=b"a sea")
    ids = llm.tokenizer.encode("a sea", add_special_tokens=False) if llm.tokenizer else []
    assert ran.out == llm.generate([ids], params)[0].outputs[0].text + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_chat_at_a_terminal(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                            ) -> None:
    from ridgeline.cli import main

    flags = ["--temperature", "0", "--max-tokens", "200", "--ignore-eos", "--threads", "1"]
    questions = iter(["one", "two " * 300, "three", "/exit"])
    interrupts = iter([True])
    real = LLM.stream

    def stream(self: LLM, *arguments: Any, **options: Any) -> Iterator[Any]:
        for output in real(self, *arguments, **options):
            yield output
            if next(interrupts, False):
                raise KeyboardInterrupt                   # Ctrl-C during the first answer

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    assert main(["chat", str(folder), *flags]) == 0
    captured = capsys.readouterr()
    assert "/reset" in captured.err.splitlines()[0] and "at most 255" in captured.err      # the second did not fit
    assert len(captured.out) > 10


@pytest.mark.parametrize(("flags", "stdin", "words"), [
    (("--system", "be kind"), b"x\n", "no system messages here"), ((), b"ok\nab\xff\n", "byte 0xff at offset 2"),
    (("--n", 2), b"x", "one answer"), (("--chat-template", "nosuch"), b"x", "nosuch"), ((), b"word " * 300, "at most 255")])
def test_chat_mistakes(run: Any, folder: Path, flags: tuple[Any, ...], stdin: bytes, words: str) -> None:
    ran = run("chat", folder, "--max-tokens", 3, "--threads", 1, *flags, stdin=stdin)
    assert ran.code == 2 and words in ran.err and ran.err.count("\n") == 1


def test_chat_without_a_template(run: Any, folder: Path, bare: Path, tmp_path: Path) -> None:
    assert "needs a tokenizer" in run("chat", bare, stdin=b"x").err
    ran = run("chat", bare, "--tokenizer", folder / "tokenizer.json", "--max-tokens", 2, stdin=b"x")
    assert ran.code == 0                                  # the template lies beside the tokenizer
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    ran = run("chat", bare, "--tokenizer", tmp_path, stdin=b"x")
    assert ran.code == 2 and "--chat-template" in ran.err


# info


def test_info_counts_what_a_hand_counts(run: Any, folder: Path) -> None:
    found = json.loads(run("info", folder, "--json", "--context", 100, "--batch", 3, "--backend", "torch").out)
    # Per layer: q (32 x 32), k and v (16 x 32 each), o (32 x 32); gate, up, down (48 x 32 each); two norms of 32.
    parameters = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32 + 2 * 32) + 2 * 320 * 32 + 32
    assert found["parameters"] == parameters and found["embedding_parameters"] == 320 * 32
    assert found["weight_bytes"] == 4 * parameters and found["dtype"] == "float32"
    assert found["bytes_by_type"] == {"F32": {"tensors": 2 * 9 + 3, "bytes": 4 * parameters}}
    assert found["kv_bytes_per_token"] == 2 * 2 * 16 * 4 and found["state_bytes_per_sequence"] == 0
    assert found["cache_bytes"] == 300 * 256 and found["inference_bytes"] == 4 * parameters + 300 * 256
    training = found["training_bytes"]
    assert (training["weights"], training["gradients"], training["optimizer_states"]) == (
        2 * parameters, 2 * parameters, 12 * parameters)
    # A token: norm inputs 2 x 32, attention input 32, q 32, k and v 32, output 32, MLP input 32, gate, up and product 3 x 48;
    # the embedded row and the last norm's input 2 x 32; fp32 logits.
    assert training["activations"] == 300 * (2 * (2 * (64 + 32 + 32 + 32 + 32 + 32 + 144) + 64) + 4 * 320)
    assert training["total"] == sum(v for k, v in training.items() if k != "total")
    half = json.loads(run("info", folder, "--json", "--dtype", "bfloat16", "--kv-cache-dtype", "float32",
                          "--backend", "torch").out)
    assert half["weight_bytes"] == 2 * parameters and half["kv_bytes_per_token"] == 256


def test_info_of_a_hybrid_equals_what_is_loaded(run: Any, tmp_path: Path) -> None:
    write_model(tmp_path, model_type="qwen3_5_text", num_hidden_layers=4, full_attention_interval=2, linear_key_head_dim=8,
                linear_value_head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_conv_kernel_dim=4)
    found = json.loads(run("info", tmp_path, "--json", "--dtype", "bfloat16", "--context", 1, "--backend", "torch").out)
    llm = LLM(tmp_path, dtype="bfloat16", threads=1, backend="torch")
    assert found["weight_bytes"] == sum(p.nbytes for p in llm.loaded.model.parameters())
    # Two of four layers: a state of 2 x 8 x 8 in fp32, and the last 3 inputs of the convolution over 2 x 8 + 16 channels.
    recurrent = [spec for spec in llm.loaded.layout.layers if isinstance(spec, Recurrent)]
    assert len(recurrent) == 2 and found["kv_bytes_per_token"] == 2 * 2 * 16 * 2
    sizes = {name: math.prod(shape) * getattr(torch, dtype).itemsize for name, shape, dtype in recurrent[0].tensors}
    assert sum(sizes.values()) in (512 + 3 * 32 * size for size in (2, 4))
    assert found["state_bytes_per_sequence"] == 2 * sum(sizes.values()) == found["cache_bytes"] - found["kv_bytes_per_token"]
    assert "recurrent state" in run("info", tmp_path).out


def test_info_for_people(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("info", folder)
    assert ran.code == 0 and ran.err == "" and all(len(line) <= 80 and line == line.rstrip() for line in ran.out.splitlines())
    text = " ".join(ran.out.split())
    assert "llama: 2 layers" in text and "2 x attention (1 KV head of 16, all tokens)" in text
    assert "KV cache 512.0 KiB (256 bytes a token, float32)" in text and "gradients" in text
    assert "recurrent" not in ran.out


def test_info_tells_the_backend_and_its_promise(run: Any, folder: Path, tmp_path: Path) -> None:
    found = json.loads(run("info", folder, "--json").out)
    assert (found["backend"], found["isa"], found["declined_layers"]) == ("native", available()[0], {})
    assert found["threads"] >= 1 and found["native_layers"] == 2 * 2 + 3 and found["promise"].startswith("the same bits")
    assert found["activation_dtype"] == "int8" and found["weight_bytes"] == 4 * found["parameters"]     # stored in F32
    text = " ".join(run("info", folder, "--dtype", "float32").out.split())
    assert f"backend native: {available()[0]} kernels" in text and "float32 activations" in text and "every layer" in text
    assert "no logit" in text

    write_model(tmp_path, model_type="qwen3_5_text", num_hidden_layers=4, full_attention_interval=2, linear_key_head_dim=8,
                linear_value_head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_conv_kernel_dim=4)
    found = json.loads(run("info", tmp_path, "--json").out)
    assert found["declined_layers"] == {
        f"model.layers.{i}.{name}": f"no native {kind}" for i in range(4)
        for name, kind in [("self_attn", "GatedAttention") if i % 2 else ("linear_attn", "GatedDeltaNet")]}
    assert found["native_layers"] == 4 + 3 and "tolerance" in found["promise"]
    text = " ".join(run("info", tmp_path).out.split())
    assert "7 of 11 layers, the others with torch: no native GatedDeltaNet (model.layers.0.linear_attn," in text

    found = json.loads(run("info", folder, "--json", "--backend", "torch").out)
    assert (found["backend"], found["backend_reason"]) == ("torch", "backend is 'torch'") and "tolerance" in found["promise"]
    ran = run("info", folder, "--dtype", "float64", "--backend", "native")
    assert (ran.code, ran.out) == (2, "") and "dtype is 'float64'" in ran.err


def test_info_reads_no_weights(run: Any, folder: Path, tmp_path: Path) -> None:
    """A config.json alone is enough; with weights, only the headers are looked at."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ran = run("info", tmp_path, "--load-format", "dummy")
    assert ran.code == 0 and "load format dummy" in ran.out
    raw = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
           "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = json.loads(run("info", tmp_path, "--load-format", "dummy", "--json").out)
    assert found["parameters"] == 70_553_706_496                        # Llama 3 70B
    ran = run("info", tmp_path)
    assert (ran.code, ran.out) == (2, "") and "dummy" in ran.err
    assert run("info", folder, "--context", 0).code == 2


# perplexity


def reference_nll(folder: Path, ids: list[int], context: int, stride: int) -> list[float]:
    """-ln p of each token but the first, by transformers, in windows that begin with the first token."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[float] = []
    start = 0
    while len(found) < len(ids) - 1:
        window = [ids[0], *ids[start + 1:start + context]]
        with torch.no_grad():
            logp = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        new = range(len(found) + 1 - start, len(window))
        found += [-float(logp[i - 1, window[i]]) for i in new]
        start += stride
    return found


@pytest.mark.parametrize(("context", "stride"), [(None, None), (40, 20), (40, 39), (64, 10), (2, 1)], ids=str)
def test_perplexity_equals_transformers(folder: Path, context: int | None, stride: int | None) -> None:
    llm = LLM(folder, threads=1, max_num_batched_tokens=32)
    text = ONE_LINE if context else ONE_LINE[:100]
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    quality = measure(llm, text, context=context, stride=stride)
    expected = reference_nll(folder, ids, context or len(ids), stride or len(ids))
    assert quality.tokens == len(ids) - 1 == len(expected)
    assert abs(math.log(quality.perplexity) - sum(expected) / len(expected)) < 1e-5


def test_every_token_is_scored_once() -> None:
    for length in range(2, 40):
        for context in range(2, 12):
            for stride in range(1, context):
                for begin in ([], [0]):
                    ids = list(range(length))
                    scored: list[int] = []
                    for window, first in windows(ids, context, stride, begin):
                        assert 1 <= first < len(window) <= context and window[:len(begin)] == begin
                        scored += window[first:]
                    assert scored == ids[1:]


def test_a_model_against_itself(folder: Path) -> None:
    llm, other = LLM(folder, threads=1), LLM(folder, threads=1, dtype="bfloat16")
    same = measure(llm, ONE_LINE, reference=llm)
    assert (same.mean_kl, same.p99_kl, same.top1_agreement) == (0.0, 0.0, 1.0)
    assert same.reference_perplexity == same.perplexity
    rounded = measure(other, ONE_LINE, reference=llm)
    assert rounded.mean_kl is not None and rounded.p99_kl is not None and rounded.top1_agreement is not None
    assert 0 < rounded.mean_kl < 1e-2 and rounded.mean_kl < rounded.p99_kl and rounded.top1_agreement > 0.9
    assert rounded.reference_perplexity == same.perplexity


def test_perplexity_command(run: Any, folder: Path, bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    flags = ("--file", file, "--context", 64, "--threads", 1)
    ran = run("perplexity", folder, *flags, "--json")
    found = json.loads(ran.out)
    llm = LLM(folder, threads=1)
    assert Quality(**found) == measure(llm, TEXT, context=64) and found.keys() == {"tokens", "perplexity"}
    ran = run("perplexity", folder, *flags, "--reference", folder, "--reference-dtype", "bfloat16")
    assert ran.code == 0 and all(w in ran.out for w in ("perplexity", "mean KL", "p99 KL", "top-1", "nats"))
    assert all(len(line) <= 90 for line in ran.out.splitlines()[:2])
    (tmp_path / "short.txt").write_text("")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    for arguments, words in (((folder, "--file", tmp_path / "nosuch"), "nosuch"),
                             ((folder, "--file", tmp_path / "bad.txt"), "0xff"),
                             ((folder, "--file", tmp_path / "short.txt"), "tokens"), ((folder,), "--file"),
                             ((folder, *flags, "--stride", 64), "stride is 64; valid: 1 to 63"),
                             ((folder, "--file", file, "--context", 999), "context is 999; valid: 2 to 256"),
                             ((bare, "--file", file), "no tokenizer"),
                             ((folder, "--file", file, "--reference", "nosuch"), "no such folder")):
        ran = run("perplexity", *arguments)
        assert (ran.code, ran.out) == (2, "") and words in ran.err and ran.err.count("\n") == 1, ran.err


# the command


def test_help_and_version(run: Any) -> None:
    ran = run("--help")
    assert ran.code == 0 and all(name in ran.out for name in COMMANDS)
    for name in COMMANDS:
        ran = run(name, *(["latency"] if name == "bench" else []), "--help")
        # quantize runs no engine, so it has none of its flags.
        assert ran.code == 0 and "MODEL" in ran.out and ("--dtype" in ran.out) == (name != "quantize")
    ran = run("bench", "--help")
    assert ran.code == 0 and all(mode in ran.out for mode in ("latency", "throughput", "serve", "compare"))
    assert run("--version").out.startswith("ridgeline ")


@pytest.mark.parametrize(("arguments", "words"), [
    (("genrate", "x"), "did you mean generate?"), (("teapot",), "Commands: generate, chat"), ((), "COMMAND"),
    (("generate",), "MODEL"), (("--nosuch",), "COMMAND"), (("info", "x", "--jsn"), "did you mean --json?"),
    (("bench", "serv"), "invalid choice: 'serv'"), (("bench",), "MODE"),
    (("bench", "latency", "x", "--wrok", "d1"), "did you mean --work?")], ids=str)
def test_wrong_command_lines(run: Any, arguments: tuple[str, ...], words: str) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "") and words in ran.err and ran.err.count("\n") == 1


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-c", "import sys; from ridgeline.cli import main; sys.exit(main())"]


def test_help_imports_nothing_heavy() -> None:
    """The answer in under 0.3 s rests on this; the time itself would depend on the machine."""
    program = ("import sys; from ridgeline.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
               "print([m for m in ('torch', 'numpy', 'rich', 'tokenizers', 'jinja2', 'gguf') if m in sys.modules])")
    for arguments in (["--help"], ["generate", "--help"], ["genrate"], ["generate", "x", "--nosuch"]):
        ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert ran.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    process = subprocess.Popen([*COMMAND, "generate", str(folder), "-p", "The sea", "--max-tokens", "200", "--ignore-eos",
                                "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1 and "Traceback" not in error and "Exception" not in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_an_answer_that_cannot_be_written(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run([*COMMAND, "info", str(folder)], stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
    assert ran.returncode == 1 and "No space left" in ran.stderr and ran.stderr.count("\n") == 1


def hear_interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_is_exit_130(folder: Path) -> None:
    process = subprocess.Popen([*COMMAND, "chat", str(folder), "--max-tokens", "3"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, preexec_fn=hear_interrupts)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    os.read(process.stdout.fileno(), 1)
    while select.select([process.stdout], [], [], 2)[0]:  # an interrupt of an answer would end that alone
        os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)                    # it waits for the next line
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in error
