"""Benchmarks: each runs by itself and says what it measured, on which machine, with which workload.

    python -m benchmarks.batching           continuous against static batching on a ragged workload
    python -m benchmarks.engine_overhead    what an engine step costs besides the model
    python -m benchmarks.peers MODEL        this engine beside llama.cpp, OpenVINO and vLLM

With --json the last line of the output is one JSON object. Figures are medians over repetitions; alternatives that are
compared run interleaved (A B A B), so that a machine that slows down slows both. Run them on an idle machine.
"""
