"""How byte-level BPE tokenizers cut text into words, by the name that GGUF gives it (tokenizer.ggml.pre).

The patterns are those of the models' own tokenizers, as llama.cpp's llama-vocab.cpp lists them; each pattern of a
family is applied to the pieces that the one before left. `(?i:'s)` is spelled ['][sS] because case folding in the
regular expression engine would also match U+017F, which the models' training did not.
"""
from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from ridgeline.errors import UnsupportedModel

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|" + _CASED_TAIL)
_GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
          rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|" + _CASED_TAIL)
_DEEPSEEK3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
              r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK3 = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# deepseek-llm lists its letters one by one: the cased letters of an older Unicode, which lacked these ranges.
_NEWER_CASED = ("\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
                "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e")
_DEEPSEEK_LETTERS = rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NEWER_CASED}]]+"
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_FAMILIES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "digits": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "deepseek-llm": ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK, r"\p{N}+"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", _CJK3, _DEEPSEEK3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "bloom": (_BLOOM,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
}

_NAMES: dict[str, tuple[str, ...]] = {
    "default": ("default",),
    "gpt-2": ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
              "mellum", "modern-bert", "a.x-4.0", "jina-v2-de", "jina-v2-es", "jina-v2-code", "roberta-bpe"),
    "digits": ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "llama3": ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
               "smaug-bpe", "chatglm-bpe", "glm4", "glm5"),
    "qwen2": ("qwen2", "stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen", "kormo", "solar-open", "grok-2"),
    "qwen35": ("qwen35",),
    "deepseek-llm": ("deepseek-llm",),
    "deepseek-coder": ("deepseek-coder",),
    "deepseek-v3": ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    "falcon": ("falcon",),
    "bloom": ("bloom", "poro-chat", "gpt3-finnish"),
    "tekken": ("tekken",),
    "gpt-4o": ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
}

# A word that is itself a token is taken whole, whatever the merges would make of it.
_IGNORE_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
                            "lfm2", "glm4", "glm5", "tekken"})
# These begin every text with the beginning-of-sequence token unless the file says otherwise.
_ADD_BOS = _IGNORE_MERGES - {"glm4", "glm5"}

_FAMILY_OF = {name: family for family, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class PreTokenizer:
    """What the name of a pre-tokenizer implies: its patterns and the defaults that GGUF leaves out."""

    patterns: tuple[str, ...]
    ignore_merges: bool
    add_bos: bool

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


def known() -> list[str]:
    return sorted(_FAMILY_OF)


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """Look a pre-tokenizer up by its GGUF name; raises UnsupportedModel, which lists the known ones."""
    family = _FAMILY_OF.get(name)
    if family is None:
        raise UnsupportedModel(f"{source}: tokenizer.ggml.pre is {name!r}, which is not known; "
                               f"known: {', '.join(known())}")
    return PreTokenizer(_FAMILIES[family], name in _IGNORE_MERGES, name in _ADD_BOS)
