"""`ridgeline serve` beside llama-server: the same file, threads, load and client (`ridgeline bench serve`), in turn.

    python -m benchmarks.servers MODEL --llama-server PATH [--clients 16] [--input-len 430] [--output-len 128]
                                       [--num-prompts 48] [--repeat 2] [--threads 2] [--json]

PATH is llama.cpp's server, built from any of its sources, for instance those that the source distribution of llama-cpp-python
holds in vendor/llama.cpp:

    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build build --target llama-server

It gets a slot for each client, and room in each for the longest prompt and answer. Each server runs in a process of its own,
one at a time, this one first, and again for each repeat; the end of what it printed is shown if it fails. Each run has
`bench serve`'s own warm-up, and words that no run before it used. The client shares the machine with the server.

    throughput   output tokens / time from the first request to the last token
    ratio        median of this server / median of llama-server: throughput should be large, the others small
"""
