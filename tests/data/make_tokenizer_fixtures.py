"""Record how llama.cpp tokenizes 200 strings, for each kind of tokenizer that a GGUF file can embed.

Usage: python tests/data/make_tokenizer_fixtures.py [--real gemma3-270m=MODEL.gguf]

Needs the packages gguf, tokenizers and llama-cpp-python. Trains small vocabularies on the text below, writes them as
vocabulary-only GGUF files and writes, beside them in tests/data/tokenizers, the ids that llama.cpp gives for each of
the strings: "special" with special tokens added and parsed, "plain" with neither. `--real` records only ids, for a
full-size model file. Everything is deterministic; run it again to get the same files.
"""
from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import gguf
from llama_cpp import Llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"

ENGLISH = """
The river bends twice before it reaches the old mill, and each bend has its own weather. In the morning there is fog on
the first; by noon the second is dry and bright. The miller's daughter said she'd never seen a stranger year: we've had
snow in May, they're saying, and it won't stop. I'm not sure that it's true, but you'll find people who'd swear to it.
Numbers matter here: 12 sacks of flour, 345 loaves, 6789 customers, 3.14159 miles of road, and 1,000,000 grains of sand.
WHY DON'T WE ASK? BECAUSE NOBODY'S LISTENING. McDonald wrote to iPhone users about OpenGL and JSON in HTTP requests.
When water is heated it boils, and when it is cooled it freezes; the temperature at which this happens is well known.
A sequence of tokens is given to the model, it predicts the next token, and that is added to the sequence.
"""
CODE = """
def fibonacci(n: int) -> int:
    if n < 2:
        return n
    previous, current = 0, 1
    for _ in range(n - 1):
        previous, current = current, previous + current
    return current

class Stack<T> { private T[] items;
    public void push(T item) { if (size == items.length) { grow(); } items[size++] = item; } }
#include <stdio.h>
int main(void) {\n\tprintf("%d\\n", 0xFF & ~mask);\n\treturn 0;\n}
SELECT name, COUNT(*) FROM users WHERE age >= 18 AND email LIKE '%@example.com' GROUP BY name;
"""
OTHER = """
Le café était déjà fermé, où êtes-vous allés ? Größe, Straße, Übermut und Ärger. El niño comió piñata ¿verdad? ¡Sí!
Привет, как дела? Сегодня хорошая погода, и мы пойдём гулять. Καλημέρα κόσμε. Dzień dobry, żółć. İstanbul'da yaşıyor.
今天天气很好，我们去公园散步吧。
日本語の文章はひらがなとカタカナと漢字でできています。안녕하세요 세계, 오늘은 날씨가 좋습니다.
مرحبا بالعالم كيف حالك اليوم؟ שלום עולם. नमस्ते दुनिया, आप कैसे हैं? สวัสดีชาวโลก
Emoji: 😀 🎉 👍🏽 👩‍👩‍👧 🏳️‍🌈 🇩🇪 ❤️ ✓ → ∑ ≤ € £ © ½ ² Ⅷ ﬁ
"""
WORDS = [
    "the", " the", "The", " model's", "don't", "I'LL", "we've", "it's", " token", "tokens", "boils",
    "temperature", " ", "  ", "   ", "     ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "\t\t", " \n", "\n ",
    "0", "7", "42", "365", "2024", "1000000", "3.14", "1,234.56", "0xFF", "_", "__init__", "(", ")", "()",
    "{}", "[]", "->", "==", "!=", "<=", "...", "!!!", "?!", "&&", "||", "#", "@user", "$9.99", "50%",
    "a+b", "~x", "`code`", "^", "é", "café", "naïve", "Größe", "ñ", "e\u0301", "Привет", "κόσμε", "İ", "ß",
    "今天", "天气很好", "，", "。", "日本語", "カタカナ", "안녕하세요", "مرحبا", "שלום", "नमस्ते",
    "สวัสดี", "😀", "👍🏽", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "❤️", "½", "²", "Ⅷ", "٣", "\u00a0", "\u3000",
    "\u200b", "\ufeff", "𝔘𝔫𝔦", "𐍈", "龘", "ꙮ", "ſ", "'ſ", "'S", "'", "''", "\"", "\u2019s",
]
SPECIALS = {
    "spm": ["<s>", "</s>", "<unk>", "<start>", "<tool>"],
    "bpe": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<|pad|>"],
}
KINDS = {
    "spm": ("spm", {"tokenizer.ggml.add_space_prefix": True}),
    "spm-no-prefix": ("spm", {"tokenizer.ggml.add_space_prefix": False}),
} | {
    f"bpe-{pre}": ("bpe", {"tokenizer.ggml.pre": pre})
    for pre in ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "olmo", "qwen2", "qwen35", "deepseek-llm",
                "deepseek-coder", "deepseek-v3", "falcon", "bloom", "tekken", "gpt-4o")
}


def strings(specials: list[str]) -> list[str]:
    """200 strings: lines and fragments of the training text, edge cases, and random mixtures."""
    rng = random.Random(20240607)
    lines = [line for line in (ENGLISH + CODE + OTHER).split("\n") if line]
    fixed = [
        "", " ", "  ", "\n", "a", " a", "a ", "  leading", "trailing  ", "\n\nx\n\n", "tab\tx\t\ty",
        "CRLF\r\nline\r\n\r\n", " \n \n ", "Hello world", "Hello  world   again", CODE, "x" * 40,
        "aaaaaaa bbbbbbb", "1234567890", "12 345 6789", "don't DON'T Don'T",
        *(special + " x" for special in specials), *("x" + special for special in specials),
        "".join(specials), f"{specials[1]}\n{specials[0]}  {specials[3]}", specials[0][:-1],
        specials[0] * 3, "<0x0A> <0xE2>", "\u2581\u2581 x \u2581", "\n" * 7, "\t" * 5, " " * 17 + "x",
        "e\u0301\u0302 n\u0303", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466!",
    ]
    result = fixed + lines
    while len(result) < 200:
        pieces = rng.choices(WORDS + specials[:2], k=rng.randint(1, 9))
        result.append(rng.choice(["", "", " "]).join(pieces))
    return result[:200]


def train_spm() -> dict[str, object]:
    """A SentencePiece-style BPE: scores are the order of the merges, single characters come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    text = ENGLISH + CODE + OTHER
    # The rarer characters stay out of the vocabulary: they are what byte tokens are for.
    counts = Counter(text.replace(" ", SPACE)) + Counter(SPACE)
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:180]
    tokenizer.train_from_iterator([text] * 2, trainers.BpeTrainer(
        vocab_size=1100, show_progress=False, min_frequency=2, limit_alphabet=180, initial_alphabet=alphabet))
    merged = [left + right for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]
    merged = [token for token in dict.fromkeys(merged) if "\n" not in token]
    letters = sorted(token for token in tokenizer.get_vocab() if len(token) == 1 and token != "\n")
    head = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<start>", CONTROL), ("<tool>", USER_DEFINED)]
    head += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    head += [("\n\n", USER_DEFINED), ("\n\n\n", USER_DEFINED)]
    pairs = head + [(token, NORMAL) for token in merged + letters]
    scores = [0.0] * len(head) + [-float(rank) for rank in range(len(merged) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [token for token, _ in pairs],
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": [kind for _, kind in pairs],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False,
    }


def train_bpe() -> dict[str, object]:
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,4}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator([ENGLISH + CODE + OTHER] * 2, trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [NORMAL] * len(tokens) + [CONTROL, CONTROL, CONTROL, USER_DEFINED, CONTROL]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + SPECIALS["bpe"],
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens), "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.ggml.padding_token_id": len(tokens) + 4,
    }


def write_gguf(path: Path, metadata: dict[str, object]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def record(name: str, model: Path, texts: list[str]) -> None:
    llama = Llama(str(model), vocab_only=True, verbose=False)
    ids = {
        "special": [llama.tokenize(text.encode(), add_bos=True, special=True) for text in texts],
        "plain": [llama.tokenize(text.encode(), add_bos=False, special=False) for text in texts],
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")
    print(f"{name}: {sum(map(len, ids['special']))} ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", action="append", default=[], metavar="NAME=FILE",
                        help="also record a full-size model")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    base = {"spm": train_spm(), "bpe": train_bpe()}
    texts = {name: strings(SPECIALS[name]) for name in base}
    texts["real"] = strings(["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>", "<unused7>"])
    (FOLDER / "strings.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    for name, metadata in base.items():
        write_gguf(FOLDER / f"{name}.gguf", metadata)
    with tempfile.TemporaryDirectory() as folder:
        for kind, (name, changes) in KINDS.items():
            path = Path(folder) / f"{kind}.gguf"
            write_gguf(path, base[name] | changes)
            record(kind, path, texts[name])
    for item in options.real:
        name, _, file = item.partition("=")
        record(name, Path(file), texts["real"])


if __name__ == "__main__":
    main()
