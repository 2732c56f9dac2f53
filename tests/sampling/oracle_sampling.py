"""Slow, plain definitions of everything in ridgeline.sampling, one row at a time."""
from __future__ import annotations

import math
from collections import Counter

import numpy as np

from ridgeline.sampling import RowContext

f32 = np.float32


def process_row(logits: list[float], row: RowContext) -> list[float]:
    p, x = row.params, [f32(v) for v in logits]
    output = list(row.output)
    banned: set[int] = set()
    if p.allowed_token_ids is not None:
        banned |= set(range(len(x))) - set(p.allowed_token_ids)
    for word in p.bad_words_token_ids:
        if [*output, word[-1]][-len(word) :] == list(word):
            banned.add(word[-1])
    if len(output) < p.min_tokens:
        banned |= set(p.stop_token_ids)
        if not p.ignore_eos:
            banned |= set(row.eos_token_ids)
    for token in banned:
        x[token] = f32(-math.inf)
    for token, bias in (p.logit_bias or {}).items():
        x[token] = x[token] + f32(bias)
    for token in {*row.prompt, *output}:
        if 0 <= token < len(x) and p.repetition_penalty != 1:
            penalty = f32(p.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(output).items():
        if 0 <= token < len(x):
            x[token] = x[token] - f32(p.frequency_penalty) * f32(count)
            x[token] = x[token] - f32(p.presence_penalty)
    return [float(v) for v in x]


def softmax(x: list[float]) -> list[float]:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def keep(x: list[float], kept: set[int]) -> list[float]:
    return [v if i in kept else -math.inf for i, v in enumerate(x)]


def best_until(score: list[float], probs: list[float], mass: float) -> set[int]:
    """The best-scored tokens until their probability reaches mass, and those that tie with the last one."""
    total, last = 0.0, -math.inf
    for i in sorted(range(len(score)), key=lambda i: -score[i]):
        total, last = total + probs[i], score[i]
        if total >= mass:
            break
    return {i for i in range(len(score)) if score[i] >= last}


def distribution_row(logits: list[float], row: RowContext) -> list[float]:
    p, size = row.params, len(logits)
    if p.greedy:
        return [float(i == logits.index(max(logits))) for i in range(size)]
    x = [(v - max(logits)) / p.temperature for v in logits]
    if 0 < p.top_k < size:
        x = keep(x, {i for i in range(size) if x[i] >= sorted(x)[-p.top_k]})
    if p.top_p < 1:
        x = keep(x, best_until(x, softmax(x), p.top_p))
    if p.min_p > 0:
        q = softmax(x)
        x = keep(x, {i for i in range(size) if q[i] >= p.min_p * max(q)})
    if p.typical_p < 1:
        q = softmax(x)
        entropy = -sum(v * math.log(v) for v in q if v > 0)
        score = [-abs(-math.log(v) - entropy) if v > 0 else -math.inf for v in q]
        x = keep(x, best_until(score, q, p.typical_p))
    return softmax(x)
