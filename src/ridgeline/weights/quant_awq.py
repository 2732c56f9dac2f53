"""AWQ, version "gemm" (AutoAWQ): four-bit codes, packed along the output features in an order of their own."""
from __future__ import annotations

import torch

from ridgeline.errors import CorruptFile
from ridgeline.weights.quantised import Codes, Context, Decode, Form, Found, QuantisedMatrix, Read, unpack

_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)         # of a word, lowest nibble first
_NIBBLE_OF_COLUMN = [_COLUMN_OF_NIBBLE.index(c) for c in range(8)]


def find_awq(context: Context) -> Found:
    """qweight (in, out / 8) int32, qzeros (groups, out / 8) int32, scales (groups, out) fp16."""
    config = context.config
    context.one_of("bits", config.get("bits", config.get("w_bit")), (4,))
    context.one_of("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    zero_point = context.one_of("zero_point", config.get("zero_point", True), (True, False))
    size = context.group_size("group_size", config.get("group_size", config.get("q_group_size", 128)))
    found = Found()
    for base in context.bases(".qweight"):
        cols, words = context.headers[f"{base}.qweight"].shape
        rows, group = 8 * words, cols if size == -1 else size
        if cols % group:
            raise CorruptFile(f"{context.source}: tensor {base + '.qweight'!r} has {cols} input features; expected a multiple "
                              f"of the group_size {group}")
        count = cols // group
        parts = {"codes": context.part(f"{base}.qweight", (cols, words), ("I32",)),
                 "scales": context.part(f"{base}.scales", (count, rows), ("F16", "BF16", "F32"))}
        if zero_point or f"{base}.qzeros" in context.headers:
            parts["zeros"] = context.part(f"{base}.qzeros", (count, words), ("I32",))
        found.add(f"{base}.weight", QuantisedMatrix((rows, cols), Form(4, group), parts, _decoder(parts, group)))
    return found


def _decoder(parts: dict[str, str], group: int) -> Decode:
    def decode(read: Read, low: int, high: int) -> Codes:
        words = slice(low // 8, -(-high // 8))

        def rows_of(name: str) -> torch.Tensor:
            fields = unpack(read(name)[:, words], 4)[..., _NIBBLE_OF_COLUMN]            # (n, words, 8)
            return fields.flatten(1)[:, : high - low].T.contiguous()                    # (rows, n)

        scales = read(parts["scales"])[:, low:high].T.float().contiguous()              # (rows, groups)
        zeros = rows_of(parts["zeros"]).short() if "zeros" in parts else torch.full(scales.shape, 8, dtype=torch.int16)
        return Codes(4, group, rows_of(parts["codes"]), scales, zeros)

    return decode
