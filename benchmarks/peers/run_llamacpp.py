"""Time llama.cpp through its C API; run by benchmarks.peers in the Python that has llama_cpp. Prints one line of JSON.

    python run_llamacpp.py FILE.gguf THREADS REPEATS '[{"name": "d8", "sequences": 8, "prompt": 128, "steps": 48}, ...]'

Counted in its favour: tokens are random and none is sampled (as llama-bench does it), and only llama_decode and the wait
for its result are timed, not the filling of a batch. Prompts go in pieces of 512 rows; logits are asked for the last row of
a prompt. Each work has one warm-up run before its repeats.
"""
from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import llama_cpp as api

ROWS = 512             # of one pass
CELLS = 256            # the cache of a sequence grows in multiples of these


class Decoder:
    """A context for some sequences, and its clock."""

    def __init__(self, model: Any, threads: int, sequences: int, length: int):
        params = api.llama_context_default_params()
        params.n_ctx = sequences * (-(-length // CELLS) * CELLS)
        params.n_batch = params.n_ubatch = max(ROWS, sequences)
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, threads, threads
        self.context = api.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp gives no context for {sequences} sequences of {length} tokens")
        self.batch = api.llama_batch_init(max(ROWS, sequences), 0, 1)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.random = random.Random(0)

    def run(self, rows: list[tuple[int, int, bool]]) -> float:
        """rows: position, sequence, logits wanted. Returns the seconds of one pass."""
        self.batch.n_tokens = len(rows)
        for i, (position, sequence, logits) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = self.random.randrange(self.vocabulary), position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0], self.batch.logits[i] = 1, sequence, logits
        start = time.perf_counter()
        code = api.llama_decode(self.context, self.batch)
        api.llama_synchronize(self.context)
        seconds = time.perf_counter() - start
        if code:
            raise SystemExit(f"llama_decode failed with code {code}")
        return seconds

    def prefill(self, sequence: int, length: int) -> float:
        return sum(self.run([(p, sequence, p == length - 1) for p in range(first, min(first + ROWS, length))])
                   for first in range(0, length, ROWS))

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def close(self) -> None:
        api.llama_batch_free(self.batch)
        api.llama_free(self.context)


def measure(decoder: Decoder, sequences: int, prompt: int, steps: int) -> float:
    """Tokens a second of one run: of the prompt if there are no steps, else of the steps alone."""
    decoder.clear()
    seconds = sum(decoder.prefill(sequence, prompt) for sequence in range(sequences))
    if not steps:
        return sequences * prompt / seconds
    seconds = sum(decoder.run([(prompt + step, sequence, True) for sequence in range(sequences)]) for step in range(steps))
    return sequences * steps / seconds


def main() -> None:
    path, threads, repeats, works = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    runs = {}
    for work in works:
        decoder = Decoder(model, threads, work["sequences"], work["prompt"] + work["steps"])
        arguments = work["sequences"], work["prompt"], work["steps"]
        measure(decoder, *arguments)
        runs[work["name"]] = [measure(decoder, *arguments) for _ in range(repeats)]
        decoder.close()
    print(json.dumps({"version": f"llama-cpp-python {api.__version__}", "tokens_per_s": runs}))


if __name__ == "__main__":
    main()
