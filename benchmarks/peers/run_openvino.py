"""Time OpenVINO GenAI; run by benchmarks.peers in the Python that has openvino_genai. Prints one line of JSON.

    python run_openvino.py FOLDER THREADS REPEATS '[{"name": "d8", "sequences": 8, "prompt": 128, "steps": 48}, ...]'

FOLDER is what `optimum-cli export openvino` wrote. One sequence runs in an LLMPipeline on paged attention, several in a
ContinuousBatchingPipeline, prefix caching off. Decode is timed as a run of 1 + steps tokens less a run of one.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

ROWS = 512             # of one pass


def greedy(tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    config.apply_chat_template = False
    return config


def scheduler(sequences: int) -> Any:
    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = 4, ROWS, max(64, sequences)
    config.dynamic_split_fuse, config.enable_prefix_caching = True, False
    return config


def alone(path: str, threads: int) -> Callable[[list[np.ndarray], int], object]:
    pipe = genai.LLMPipeline(path, "CPU", ATTENTION_BACKEND="PA", INFERENCE_NUM_THREADS=threads)

    def run(prompts: list[np.ndarray], tokens: int) -> object:
        ids = prompts[0]
        return pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), greedy(tokens))
    return run


def together(path: str, threads: int, sequences: int) -> Callable[[list[np.ndarray], int], object]:
    pipe = genai.ContinuousBatchingPipeline(path, scheduler(sequences), "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(prompts: list[np.ndarray], tokens: int) -> object:
        return pipe.generate([ov.Tensor(ids) for ids in prompts], [greedy(tokens)] * len(prompts))
    return run


def main() -> None:
    path, threads, repeats, works = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    with open(f"{path}/config.json") as file:
        vocabulary = json.load(file)["vocab_size"]
    rng = np.random.default_rng(0)
    runs: dict[str, list[float]] = {}
    most = max((work["sequences"] for work in works), default=1)
    for single in (True, False):                             # one pipeline in memory at a time
        chosen = [work for work in works if (work["sequences"] == 1) == single]
        if not chosen:
            continue
        run = alone(path, threads) if single else together(path, threads, most)

        def seconds(work: dict[str, Any], tokens: int, run: Callable[[list[np.ndarray], int], object] = run) -> float:
            shape = (1, work["prompt"])
            prompts = [rng.integers(0, vocabulary, shape).astype(np.int64) for _ in range(work["sequences"])]
            start = time.perf_counter()
            run(prompts, tokens)
            return time.perf_counter() - start

        for work in chosen:
            count, steps = work["sequences"], work["steps"]
            seconds(work, min(4, 1 + steps))
            rates = []
            for _ in range(repeats):
                first = seconds(work, 1)
                rates.append(count * steps / (seconds(work, 1 + steps) - first) if steps else count * work["prompt"] / first)
            runs[work["name"]] = rates
        del run, seconds
    print(json.dumps({"version": f"openvino-genai {genai.__version__}", "tokens_per_s": runs}))


if __name__ == "__main__":
    main()
