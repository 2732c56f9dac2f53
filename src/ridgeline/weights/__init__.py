"""Where parameters come from: safetensors, GGUF and dummy checkpoints under one interface.

Importing this package imports nothing heavy; take what you need from its modules:

    checkpoint.py        Checkpoint, Packed, open_checkpoint
    hf_config.py         config.json and generation_config.json
    safetensors_file.py  a folder with config.json and (sharded) safetensors
    gguf_file.py         the GGUF container: metadata, tensor table, raw blocks
    gguf_config.py       GGUF metadata -> Hugging Face config
    gguf_names.py        GGUF tensor names and layouts -> Hugging Face names and layouts
    gguf_checkpoint.py   the three above as a Checkpoint
    dummy.py             weights made up from parameter names
    mapping.py           From: how a model's parameter is cut out of a checkpoint's tensors
    load.py              load_weights: fills a model built on the meta device
"""
