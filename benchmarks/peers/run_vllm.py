"""Time vLLM on a CPU; run by benchmarks.peers in the Python that has vllm. Prints one line of JSON, among
the log lines of vLLM.

    python run_vllm.py FOLDER THREADS REPEATS '[{"name": "d8", "sequences": 8, "prompt": 128, "steps": 48}, ...]'

FOLDER is a checkpoint folder, run in bfloat16; prefix caching is off, passes have at most 512 rows. Decode is timed as a
run of 1 + steps tokens less a run of one.
"""
from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ROWS = 512             # of one pass


def main() -> None:
    path, threads, repeats, works = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")           # GiB
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import numpy as np
    import vllm  # reads the environment as it is imported

    length = max(work["prompt"] + work["steps"] + 1 for work in works)
    engine = vllm.LLM(path, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max(1024, length), max_num_seqs=64,
                      max_num_batched_tokens=ROWS, enable_prefix_caching=False, seed=0)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(0)

    def seconds(work: dict[str, Any], tokens: int) -> float:
        prompts = [{"prompt_token_ids": rng.integers(0, vocabulary, work["prompt"]).tolist()}
                   for _ in range(work["sequences"])]
        params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    runs = {}
    for work in works:
        count, steps = work["sequences"], work["steps"]
        seconds(work, min(4, 1 + steps))
        rates = []
        for _ in range(repeats):
            first = seconds(work, 1)
            rates.append(count * steps / (seconds(work, 1 + steps) - first) if steps else count * work["prompt"] / first)
        runs[work["name"]] = rates
    print(json.dumps({"version": f"vllm {vllm.__version__}", "tokens_per_s": runs}), flush=True)


if __name__ == "__main__":
    main()
