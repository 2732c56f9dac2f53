"""The logits of llama.cpp for a list of token ids, into a file; run by benchmarks.accuracy in the Python that has llama_cpp.

    python logits_llamacpp.py FILE.gguf THREADS OUT < ids.json

OUT gets (tokens, vocabulary) float32 in the order of the tokens.
"""
from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp as api

ROWS = 128             # of one pass: their logits over 262,144 tokens are 134 MB


def main() -> None:
    path, threads, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ids: list[int] = json.load(sys.stdin)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(ids) + ROWS, ROWS, ROWS
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(ROWS, 0, 1)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    with open(out, "wb") as file:
        for first in range(0, len(ids), ROWS):
            part = ids[first:first + ROWS]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, first + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
            if code := api.llama_decode(context, batch):
                raise SystemExit(f"llama_decode failed with code {code}")
            file.write(ctypes.string_at(api.llama_get_logits(context), len(part) * vocabulary * 4))
    print(api.llama_print_system_info().decode())


if __name__ == "__main__":
    main()
