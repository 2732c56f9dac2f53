"""Levers: what one could change, as another spec, machine or way to run, and what the prediction says it gains."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.shard import sharded
from ridgeline.analysis.spec import WEIGHT_BITS, Attention, Layer, Matrix, Spec
from ridgeline.analysis.subject import Subject, bound_of
from ridgeline.analysis.work import decode, totals
from ridgeline.errors import ConfigError

PAYS = 1.02                    # a smaller gain is not worth a change, and not told from chance
BATCHED = 8                    # times as many sequences, of the lever "larger batch"
PREFIX_SHARE = 0.5             # of a prompt that other prompts begin with as well
MACHINES = 4                   # others that are shown
COMPRESSION = 2.0              # tokens of a prompt for each one that is kept
CHUNKS = (128, 256, 512, 1024, 2048)
ITL, THROUGHPUT, TTFT = "ITL", "decode tokens/s", "TTFT"


@dataclass(frozen=True)
class Question:
    """The state that advice is asked for: sequences, cached tokens of each, tokens of an answer."""

    batch: int
    context: int
    output: int


@dataclass
class Advice:
    """One lever. predicted_gain: the old time by the new one (of throughput the new by the old), above 1 is better; metric: of
    what; verify: the name of its A/B run, None where the engine does not have it; kind: setting, model or hardware."""

    lever: str
    metric: str
    predicted_gain: float
    reason: str
    cost: str
    kind: str = "setting"
    verify: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)      # what the A/B run needs
    verified_gain: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def pays(self) -> bool:
        """By what was realised, where it was tried."""
        return (self.predicted_gain if self.verified_gain is None else self.verified_gain) >= PAYS

    def as_json(self) -> dict[str, Any]:
        return {"lever": self.lever, "metric": self.metric, "kind": self.kind, "predicted_gain": self.predicted_gain,
                "verified_gain": self.verified_gain, "interval": None if self.interval is None else list(self.interval),
                "pays": self.pays, "verifiable": self.verify is not None, "reason": self.reason, "cost": self.cost}


Lever = Callable[[Subject, Question], Iterator[Advice]]


def larger_batch(subject: Subject, q: Question) -> Iterator[Advice]:
    batch = q.batch * BATCHED
    before, after = subject.decode_s(q.batch, q.context), subject.decode_s(batch, q.context)
    gain = BATCHED * before / after
    need = subject.memory_bytes(batch, q.context + q.output)
    held, weights = subject.memory_bytes(q.batch, q.context + q.output), _share(subject, q, "weight_bytes")
    short = "" if need <= subject.hardware.memory_bytes else "; it does not fit the memory"
    yield Advice(f"batch {q.batch} -> {batch}", THROUGHPUT, gain,
                 f"weights are {weights:.0%} of the bytes of a step and are read once for all sequences",
                 f"ITL x{after / before:.2f}, {_size(need - held)} more of cache{short}",
                 verify="batch", options={"batch": batch})


def weight_types(subject: Subject, q: Question) -> Iterator[Advice]:
    held = {m.kind for m in subject.spec.matrices}
    for name, kind, ends in (("int8", "q8_0", "q8_0"), ("int4", "q4_0", "q8_0")):
        spec = requantised(subject.spec, kind, ends)
        smaller = spec.weight_bytes < 0.98 * subject.spec.weight_bytes
        floats = any(k in ("f32", "f16", "bf16") for k in held)
        if not smaller:
            yield Advice(f"weights {name}", ITL, 1.0,
                         f"weights are stored in {', '.join(sorted(held))} already: {name} is no smaller", "none", kind="model")
            continue
        gain = subject.decode_s(q.batch, q.context) / subject.other(spec=spec).decode_s(q.batch, q.context)
        saved = subject.spec.weight_bytes - spec.weight_bytes
        yield Advice(f"weights {name}", ITL, gain,
                     f"{_size(subject.spec.weight_bytes)} of weights become {_size(spec.weight_bytes)}; they are "
                     f"{_share(subject, q, 'weight_bytes'):.0%} of the bytes of a step", f"quality; {_size(saved)} less memory",
                     kind="setting" if floats else "model", verify="quantization" if floats else None,
                     options={"quantization": name})


def kv_cache(subject: Subject, q: Question) -> Iterator[Advice]:
    if subject.spec.kv_dtype == "int8":
        yield Advice("KV cache int8", ITL, 1.0, "keys and values are 8 bits already", "none")
        return
    other = subject.other(spec=replace(subject.spec, kv_dtype="int8"))
    gain = subject.decode_s(q.batch, q.context) / other.decode_s(q.batch, q.context)
    saved = subject.cache_bytes(q.batch, q.context) - other.cache_bytes(q.batch, q.context)
    yield Advice("KV cache int8", ITL, gain, f"keys and values are {_share(subject, q, 'kv_bytes'):.0%} of the bytes of a step",
                 f"quality; {_size(saved)} less memory",
                 verify="kv_cache_dtype")


def prefix_cache(subject: Subject, q: Question) -> Iterator[Advice]:
    shared = int(q.context * PREFIX_SHARE) // 16 * 16
    if not shared:
        return
    gain = subject.prefill_s(q.context) / subject.prefill_s(q.context - shared, start=shared)
    yield Advice("prefix cache", TTFT, gain,
                 f"where {shared} of {q.context} prompt tokens were seen before, only the others are computed",
                 "none: pages are kept as long as nobody needs them", verify="prefix", options={"shared": shared})


def chunk_size(subject: Subject, q: Question) -> Iterator[Advice]:
    """Full chunks of another size: larger ones have fewer passes, smaller ones stall the sequences that decode for less."""
    now = subject.prefill_s(q.context)
    passes = {c: -(-q.context // c) for c in (*CHUNKS, subject.chunk)}
    others = {c: subject.other(chunk=c).prefill_s(q.context) for c in CHUNKS if passes[c] != passes[subject.chunk]}
    if not others:
        return
    best = min(others, key=lambda c: others[c])
    stall = {c: subject.other(chunk=c).prefill_s(min(c, q.context)) for c in (subject.chunk, best)}
    yield Advice(f"chunks of {best} rows", TTFT, now / others[best],
                 f"a prompt of {q.context} tokens takes {passes[best]} passes instead of {passes[subject.chunk]}",
                 f"sequences that decode wait {stall[best] * 1e3:.0f} instead of {stall[subject.chunk] * 1e3:.0f} ms for a "
                 "full chunk",
                 verify="chunk", options={"chunk": best})


def other_attention(subject: Subject, q: Question) -> Iterator[Advice]:
    """What if this model kept less for each token: fewer KV heads, a latent, linear attention in three of four layers."""
    layers = subject.spec.attention_layers()
    if not layers:
        return
    now = subject.decode_s(q.batch, q.context)
    share = _share(subject, q, "kv_bytes")
    heads = max(a.kv_heads for a in layers)
    if heads > 1:
        spec = regrouped(subject.spec, max(1, heads // 4))
        yield Advice(f"GQA with {max(1, heads // 4)} instead of {heads} KV heads", ITL, now / subject.other(spec=spec).decode_s(
            q.batch, q.context), f"keys and values are {share:.0%} of the bytes of a step", "another model", kind="model")
    else:
        yield Advice("GQA with fewer KV heads", ITL, 1.0, "the model has one KV head already", "another model", kind="model")
    for name, kept in (("MLA with a latent of an eighth", 1 / 8), ("linear attention or SSM in 3 of 4 layers", 1 / 4)):
        gain = now / (now - (1 - kept) * _kv_seconds(subject, q))
        yield Advice(name, ITL, gain, f"reading {share:.0%} of the bytes of a step shrinks to {share * kept:.0%}",
                     "another model", kind="model")


def prompt_compression(subject: Subject, q: Question) -> Iterator[Advice]:
    kept = max(1, int(q.context / COMPRESSION))
    gain = subject.prefill_s(q.context) / subject.prefill_s(kept)
    longer = subject.decode_s(q.batch, kept) / subject.decode_s(q.batch, q.context)
    yield Advice(f"prompt compression {COMPRESSION:.0f}x", TTFT, gain,
                 f"{kept} instead of {q.context} prompt tokens; ITL x{longer:.2f}",
                 "quality, and the time of the compressor, which is not counted", kind="model")


def diffusion(subject: Subject, q: Question, block: int = 32, committed: float = 2.0) -> Iterator[Advice]:
    """Denoising passes over a block; published block-diffusion models commit two to four tokens a pass."""
    now, one = subject.decode_s(q.batch, q.context), subject.decode_s(q.batch, q.context, drafts=block - 1)
    yield Advice(f"block diffusion, blocks of {block}", ITL, committed * now / one,
                 f"a pass over {block} rows takes {one / now:.2f} times a decoding step; taken to commit {committed:.0f} "
                 f"tokens, it pays from {one / now:.1f} on", "another model", kind="model")


def speculation(subject: Subject, q: Question, tokens_per_pass: float, drafted: float, drafts: int,
                seconds: Mapping[int, float] | None = None) -> Advice:
    """n-gram look-up. tokens_per_pass, drafted: means measured on a text; drafts: most in a pass; seconds: measured, of a step
    with so many rows of each sequence, predicted where missing."""
    one, many = ((seconds or {}).get(rows) or subject.decode_s(q.batch, q.context, rows - 1) for rows in (1, 1 + drafts))
    mean = one + (many - one) * drafted / drafts
    return Advice(f"speculation: n-gram, {drafts} drafts", ITL, tokens_per_pass * one / mean,
                  f"{tokens_per_pass:.2f} tokens a pass on the sample text, and a pass with {drafts} drafts takes "
                  f"{many / one:.2f} times one without", "none: the output is the same", verify="ngram",
                  options={"drafts": drafts})


def pruned_head(subject: Subject, q: Question, scored: float) -> Iterator[Advice]:
    """The engine prunes by itself where it pays; the gain is over reading the whole head. scored: share of its rows that had
    to be scored exactly."""
    if subject.head_share == 1:
        return
    gain = subject.other(head_share=1.0).decode_s(q.batch, q.context) / subject.decode_s(q.batch, q.context)
    yield Advice("pruned head (on already)", ITL, gain,
                 f"half of each weight is enough for {1 - scored:.0%} of the head's rows",
                 "none: the token is the same", verify="pruned_head")


def tensor_parallel(subject: Subject, q: Question, devices: int = 2) -> Iterator[Advice]:
    name, cost = f"tensor parallel, {devices} devices", "another device, and what the two exchange"
    if subject.spec.parallel > 1:
        return
    if subject.hardware.link_bandwidth is None:
        yield Advice(name, ITL, 1.0, f"{subject.hardware.name} has no second device that a link leads to", cost,
                     kind="hardware")
        return
    try:
        other = subject.other(spec=sharded(subject.spec, devices))
    except ConfigError as error:
        yield Advice(name, ITL, 1.0, str(error), cost, kind="hardware")
        return
    gain = subject.decode_s(q.batch, q.context) / other.decode_s(q.batch, q.context)
    each, whole = _size(other.spec.weight_bytes), _size(subject.spec.weight_bytes)
    yield Advice(name, ITL, gain, f"each device reads {each} of {whole} of weights", cost, kind="hardware")


def other_hardware(subject: Subject, q: Question, machines: Sequence[Hardware]) -> list[Advice]:
    """The fastest machines that hold it, by their roofs: nothing is known of their kernels' efficiency and overhead."""
    found = sorted(_machines(subject, q, machines), key=lambda a: -a.predicted_gain)
    return found[:MACHINES]


def _machines(subject: Subject, q: Question, machines: Sequence[Hardware]) -> Iterator[Advice]:
    now = subject.decode_s(q.batch, q.context)
    for machine in machines:
        how: dict[str, Any] = {"kernels": "fused", "stream": 2, "precision": "bfloat16"} if machine.device == "gpu" else {
            "kernels": "native", "stream": 4, "precision": "int8"}
        other = subject.other(hardware=machine, now=None, spec=replace(subject.spec, **how))
        if machine.memory_bytes < other.memory_bytes(q.batch, q.context + q.output):
            continue
        step = other.decode_s(q.batch, q.context)
        price = "" if machine.price_per_hour is None else f", ${machine.price_per_hour:.2f} an hour"
        yield Advice(f"hardware: {machine.name}", ITL, now / step, f"reads {machine.bandwidth / 1e9:.0f} GB/s instead of "
                     f"{subject.hardware.bandwidth / 1e9:.0f}; at its roof, without overhead", f"another machine{price}",
                     kind="hardware")


LEVERS: tuple[Lever, ...] = (larger_batch, weight_types, kv_cache, prefix_cache, chunk_size, other_attention,
                             prompt_compression, diffusion, tensor_parallel)


def advise(subject: Subject, question: Question, more: Sequence[Advice] = ()) -> list[Advice]:
    """All levers, the largest gain first; those that do not pay at the end."""
    return ranked([advice for lever in LEVERS for advice in lever(subject, question)] + list(more))


def ranked(found: Sequence[Advice]) -> list[Advice]:
    return sorted(found, key=lambda a: (not a.pays, ("setting", "model", "hardware").index(a.kind), -a.predicted_gain))


def requantised(spec: Spec, kind: str, ends: str) -> Spec:
    """The same model with its layers' matrices in one type and its ends in another, where that makes them smaller."""
    def smaller(m: Matrix, to: str) -> Matrix:
        return Matrix.of(m.rows, m.cols, to) if m.rows * m.cols * WEIGHT_BITS[to] / 8 < m.nbytes else m

    def part(inner: Any) -> Any:
        changed = {name: smaller(value, kind) for name, value in vars(inner).items() if isinstance(value, Matrix)}
        return replace(inner, **changed)

    layers = tuple(Layer(replace(layer.mix, inner=part(layer.mix.inner)), replace(layer.feed, inner=part(layer.feed.inner)))
                   for layer in spec.layers)
    return replace(spec, layers=layers, embed=smaller(spec.embed, ends), head=smaller(spec.head, ends))


def regrouped(spec: Spec, kv_heads: int) -> Spec:
    """The same model with so many KV heads."""
    def fewer(a: Any) -> Any:
        if not isinstance(a, Attention) or a.kv_heads <= kv_heads:
            return a
        k, v = (replace(m, rows=m.rows * kv_heads // a.kv_heads, nbytes=m.nbytes * kv_heads // a.kv_heads) for m in (a.k, a.v))
        return replace(a, k=k, v=v, kv_heads=kv_heads)

    return replace(spec, layers=tuple(replace(x, mix=replace(x.mix, inner=fewer(x.mix.inner))) for x in spec.layers))


def _share(subject: Subject, q: Question, size: str) -> float:
    found = totals(p.work for p in subject.predict(decode(q.context, batch=q.batch)))
    return float(getattr(found, size)) / found.bytes if found.bytes else 0.0


def _kv_seconds(subject: Subject, q: Question) -> float:
    return sum(p.seconds for p in subject.predict(decode(q.context, batch=q.batch)) if p.work.component == "attention.core")


def bottleneck(subject: Subject, q: Question) -> str:
    return bound_of(subject.predict(decode(q.context, batch=q.batch)))


def _size(count: float) -> str:
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"
