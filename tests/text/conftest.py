from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.text.gguf_tokenizer import tokenizer_from_metadata
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.weights.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data" / "tokenizers"


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Built tokenizers go to a folder of this run, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def spm(own_cache: None) -> Tokenizer:
    """SentencePiece BPE with byte fallback and a space prefix."""
    return load_tokenizer(DATA / "spm.gguf")


@pytest.fixture(scope="session")
def spm_without_prefix(own_cache: None) -> Tokenizer:
    """The same vocabulary used as Gemma does: no space is put in front of the text."""
    metadata = GGUFFile(DATA / "spm.gguf").metadata | {"tokenizer.ggml.add_space_prefix": False}
    return tokenizer_from_metadata(metadata, "spm.gguf without a prefix")


@pytest.fixture(scope="session")
def bpe(own_cache: None) -> Tokenizer:
    """Byte-level BPE."""
    return load_tokenizer(DATA / "bpe.gguf")


@pytest.fixture(scope="session")
def wordpiece(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens have no fixed bytes: the space before one depends on its neighbour."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["[UNK]", "the", "river", "bend", "##s", "##ing", "no", "caf", "##é", "今", "##天", ".", ",", "a", "##b",
             "##c"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    folder = tmp_path_factory.mktemp("wordpiece")
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)
