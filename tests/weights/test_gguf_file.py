"""The GGUF container: what is read, and that every kind of damage is a CorruptFile with a useful message."""
from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import CorruptFile, ModelNotFound, RidgelineError
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.gguf_file import GGUFFile

FIXTURE = Path(__file__).parents[1] / "data" / "gguf" / "llama" / "model-q8_0.gguf"
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    pairs: list[bytes] = [], tensors: list[bytes] = [], data: bytes = b"", *, magic: bytes = b"GGUF",  # noqa: B006
    version: int = 3, tensor_count: int | None = None, pair_count: int | None = None, alignment: int = 32,
) -> bytes:
    header = magic + struct.pack(
        "<IQQ", version, len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head = header + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    def write_and_open(content: bytes) -> GGUFFile:
        path = tmp_path / "some.gguf"
        path.write_bytes(content)
        return GGUFFile(path)

    return write_and_open


def test_every_metadata_type(opened: Any) -> None:
    file = opened(gguf([
        pair("u8", 0, struct.pack("<B", 200)), pair("i8", 1, struct.pack("<b", -3)),
        pair("u16", 2, struct.pack("<H", 60000)), pair("i16", 3, struct.pack("<h", -300)),
        pair("u32", 4, struct.pack("<I", 1 << 31)), pair("i32", 5, struct.pack("<i", -5)),
        pair("f32", 6, struct.pack("<f", 0.5)), pair("true", 7, b"\x01"), pair("text", 8, text("héllo")),
        pair("u64", 10, struct.pack("<Q", 1 << 63)), pair("i64", 11, struct.pack("<q", -(1 << 62))),
        pair("f64", 12, struct.pack("<d", 0.1)),
        pair("numbers", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 7)),
        pair("flags", 9, struct.pack("<IQ2?", 7, 2, True, False)),
        pair("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
        pair("nested", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQI", 4, 1, 9) + struct.pack("<IQ", 8, 0)),
    ]))
    meta = file.metadata
    assert [meta[k] for k in ("u8", "i8", "u16", "i16", "u32", "i32")] == [200, -3, 60000, -300, 1 << 31, -5]
    assert [meta[k] for k in ("f32", "true", "text", "u64", "i64", "f64")] == [
        0.5, True, "héllo", 1 << 63, -(1 << 62), 0.1
    ]
    assert meta["true"] is True
    assert meta["numbers"].dtype == np.int32 and meta["numbers"].tolist() == [-1, 0, 7]
    assert meta["flags"].tolist() == [True, False]
    assert meta["words"] == ["a", ""]
    assert meta["nested"][0].tolist() == [9] and meta["nested"][1] == []


def test_bytes_that_are_not_utf8_survive(opened: Any) -> None:
    pieces = [bytes([b]) for b in range(256)] + [b"\xf0\x9f", "🦙".encode()]
    words = pair("t", 9, struct.pack("<IQ", 8, len(pieces)) + b"".join(map(text, pieces)))
    decoded = opened(gguf([words])).metadata["t"]
    assert [piece.encode("utf-8", "surrogateescape") for piece in decoded] == pieces
    assert decoded[-1] == "🦙"


def test_tensors_are_row_major_views(opened: Any) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    file = opened(gguf([], [tensor("w", [3, 2], F32, 0)], data))
    assert file.tensors["w"].shape == (2, 3) and file.tensors["w"].nbytes == 24
    assert file.raw("w").shape == (2, 12)
    assert file.raw("w").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    file.release("w")
    assert file.raw("w").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_version_2_and_another_alignment(opened: Any) -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", 64))]
    data = bytes(64) + np.ones(2, dtype=np.float32).tobytes()
    tensors = [tensor("a", [1], F32, 0), tensor("b", [2], F32, 64)]
    file = opened(gguf(pairs, tensors, data, version=2, alignment=64))
    assert file.version == 2 and file.data_offset % 64 == 0
    assert file.raw("b").view(np.float32).tolist() == [[1, 1]]


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    path.write_bytes(FIXTURE.read_bytes())
    file = GGUFFile(path)
    file.raw("token_embd.weight")[:] = 0
    assert path.read_bytes() == FIXTURE.read_bytes()


def test_a_vocabulary_of_262144_strings_takes_under_a_second_of_cpu(opened: Any) -> None:
    words = b"".join(text(f"token{i}") for i in range(262_144))
    content = gguf([pair("t", 9, struct.pack("<IQ", 8, 262_144) + words)])
    start = time.process_time()
    file = opened(content)
    assert time.process_time() - start < 1.0
    assert file.metadata["t"][-1] == "token262143"


ABSURD = 1 << 62
DAMAGED = {
    "empty": (b"", "empty"),
    "another format": (gguf(magic=b"GGJT"), "not a GGUF file"),
    "version 1": (gguf(version=1), "version 1 "),
    "version 4": (gguf(version=4), "version 4 "),
    "big endian": (gguf(version=3 << 24), r"3 \(big endian\)"),
    "more tensors than bytes": (gguf(tensor_count=ABSURD), "tensor count"),
    "more metadata than bytes": (gguf(pair_count=ABSURD), "metadata count"),
    "fewer metadata than counted": (gguf([pair("k", 8, text("x" * 40))], pair_count=2, alignment=1),
                                    "ends at byte .* inside the length of a metadata key"),
    "key longer than the file": (gguf([struct.pack("<Q", ABSURD) + bytes(32)]), "inside a metadata key"),
    "unknown value type": (gguf([pair("k", 13, bytes(8))]), "'k' has unknown type 13"),
    "unknown element type": (gguf([pair("k", 9, struct.pack("<IQ", 99, 1) + bytes(8))]), "'k' has unknown type 99"),
    "absurd array length": (gguf([pair("k", 9, struct.pack("<IQ", 6, ABSURD))]), "length of 'k'"),
    "absurd string array": (gguf([pair("k", 9, struct.pack("<IQ", 8, ABSURD))]), "length of 'k'"),
    "string array cut off": (gguf([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 99))]),
                             "string 1 of 2 of 'k'"),
    "deep nesting": (gguf([pair("k", 9, struct.pack("<IQ", 9, 1) * 9)]), "nests arrays"),
    "the same key twice": (gguf([pair("k", 0, b"\0")] * 2), "'k' appears twice"),
    "alignment of 48": (gguf([pair("general.alignment", 4, struct.pack("<I", 48))]), "power of two"),
    "alignment as text": (gguf([pair("general.alignment", 8, text("x"))]), "general.alignment"),
    "no dimensions": (gguf([], [tensor("w", [], F32, 0)]), "'w' has 0 dimensions"),
    "five dimensions": (gguf([], [tensor("w", [1] * 5, F32, 0)], bytes(4)), "'w' has 5 dimensions"),
    "a dimension of zero": (gguf([], [tensor("w", [4, 0], F32, 0)], bytes(16)), "at least 1"),
    "absurd dimensions": (gguf([], [tensor("w", [ABSURD, ABSURD], F32, 0)], bytes(16)), "'w'.*needs bytes"),
    "unknown tensor type": (gguf([], [tensor("w", [4], 77, 0)], bytes(16)), "'w' has unknown type 77"),
    "rows that are no blocks": (gguf([], [tensor("w", [33, 2], Q8_0, 0)], bytes(99)), "multiple of 32"),
    "offset not aligned": (gguf([], [tensor("w", [1], F32, 4)], bytes(99)), "multiple of 32"),
    "beyond the end": (gguf([], [tensor("w", [64], F32, 0)], bytes(128)), "'w'.*truncated"),
    "overlap": (gguf([], [tensor("v", [16], F32, 32), tensor("w", [16], F32, 0)], bytes(128)), "'w' ends.*'v'"),
    "the same tensor twice": (gguf([], [tensor("w", [1], F32, 0)] * 2, bytes(4)), "'w' appears twice"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(opened: Any, name: str) -> None:
    content, message = DAMAGED[name]
    with pytest.raises(CorruptFile, match=message) as caught:
        opened(content)
    assert "some.gguf" in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        GGUFFile(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelNotFound, match="directory"):
        GGUFFile(tmp_path)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_truncation_anywhere_is_a_corrupt_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = FIXTURE.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 64))])
    with pytest.raises(CorruptFile):
        GGUFFile(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_never_end_in_another_exception(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    family = data.draw(st.sampled_from(["llama", "phi3", "gemma3_text", "qwen3_5_text", "gpt2"]))
    source = FIXTURE.parents[1] / family / "model-q8_0.gguf"
    header = GGUFFile(source).data_offset
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "flip.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except RidgelineError as error:
        assert "flip.gguf" in str(error)
    else:
        assert checkpoint.config["vocab_size"] > 0
