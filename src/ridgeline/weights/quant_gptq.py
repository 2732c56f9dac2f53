"""GPTQ (AutoGPTQ, GPTQModel): codes of 4 or 8 bits packed along the input features, zeros along the output features."""
from __future__ import annotations

from ridgeline.errors import CorruptFile
from ridgeline.weights.quantised import Codes, Context, Decode, Form, Found, QuantisedMatrix, Read, groups, unpack


def find_gptq(context: Context) -> Found:
    """qweight (in * bits / 32, out) int32, qzeros (groups, out * bits / 32) int32, scales (groups, out) fp16, g_idx (in).

    checkpoint_format "gptq" stores zeros less one, "gptq_v2" as they are.
    """
    config = context.config
    bits: int = context.one_of("bits", config.get("bits"), (4, 8))
    kind = context.one_of("checkpoint_format", config.get("checkpoint_format", "gptq") or "gptq", ("gptq", "gptq_v2"))
    if config.get("is_marlin_format"):
        context.refuse("is_marlin_format", True, "False (codes in the order of GPTQ)")
    context.one_of("pack_dtype", config.get("pack_dtype") or "int32", ("int32",))
    if config.get("dynamic"):
        context.refuse("dynamic", config["dynamic"], "one rule for all layers")
    size = context.group_size("group_size", config.get("group_size", 128))
    found = Found()
    per_word = 32 // bits
    for base in context.bases(".qweight"):
        words, rows = context.headers[f"{base}.qweight"].shape
        cols = words * per_word
        group = cols if size == -1 else size
        count = groups(cols, group)
        floats = ("F16", "BF16", "F32")
        parts = {"codes": context.part(f"{base}.qweight", (words, rows), ("I32",)),
                 "scales": context.part(f"{base}.scales", (count, rows), floats),
                 "zeros": context.part(f"{base}.qzeros", (count, groups(rows, per_word)), ("I32",))}
        order = None
        if f"{base}.g_idx" in context.headers:
            order = parts["order"] = context.part(f"{base}.g_idx", (cols,), ("I32", "I64"))
        decode = _decoder(context, parts, bits, group, 1 if kind == "gptq" else 0)
        found.add(f"{base}.weight", QuantisedMatrix((rows, cols), Form(bits, group, order=order), parts, decode))
    return found


def _decoder(context: Context, parts: dict[str, str], bits: int, group: int, stored_less: int) -> Decode:
    per_word = 32 // bits

    def decode(read: Read, low: int, high: int) -> Codes:
        codes = unpack(read(parts["codes"])[:, low:high], bits).permute(1, 0, 2).flatten(1)           # (rows, cols)
        scales = read(parts["scales"])[:, low:high].T.float().contiguous()                            # (rows, groups)
        stored = unpack(read(parts["zeros"])[:, low // per_word : -(-high // per_word)], bits).flatten(1)
        zeros = (stored[:, : high - low].T.short() + stored_less).contiguous()                        # (rows, groups)
        if bits == 8 and int(zeros.max()) > 255:
            raise CorruptFile(f"{context.source}: tensor {parts['zeros']!r} holds a zero of {int(zeros.max())}; allowed: 0 to "
                              "255")
        order = None
        if "order" in parts:
            order = context.order(parts["order"], scales.shape[1], group)
        return Codes(bits, group, codes, scales, zeros, order)

    return decode
