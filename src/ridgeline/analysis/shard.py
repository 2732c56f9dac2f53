"""One device's share of a model whose layers are cut across several: tensor parallelism (arXiv 1909.08053)."""
from __future__ import annotations

from dataclasses import replace

from ridgeline.analysis.spec import Attention, Feed, Layer, Matrix, Mixer, Mla, Mlp, Moe, Part, Recurrent, Spec
from ridgeline.errors import ConfigError


def sharded(spec: Spec, devices: int) -> Spec:
    """What one of `devices` holds and computes: heads, MLP columns, experts' columns and the vocabulary are cut; norms, routers
    and latents are held by each, and so are KV heads where there are fewer than devices.

    raises ConfigError where heads or columns do not divide.
    """
    if devices == 1:
        return spec
    layers = tuple(Layer(_part(layer.mix, devices), _part(layer.feed, devices)) for layer in spec.layers)
    head = _columns(spec.head, devices, pad=True)
    return replace(spec, layers=layers, embed=_columns(spec.embed, devices, pad=True), head=head,
                   parallel=devices)


def _part(part: Part, devices: int) -> Part:
    return replace(part, inner=_inner(part.inner, devices))


def _inner(inner: Mixer | Feed, n: int) -> Mixer | Feed:
    if isinstance(inner, Attention):
        kv = _kv_heads(inner.kv_heads, n)
        return replace(inner, q=_columns(inner.q, n), k=_columns(inner.k, inner.kv_heads // kv), o=_rows(inner.o, n),
                       v=_columns(inner.v, inner.kv_heads // kv), heads=_divide("attention heads", inner.heads, n), kv_heads=kv)
    if isinstance(inner, Recurrent):
        heads = _divide("value heads", inner.value_heads, n)
        qkv, z, b, a = (_columns(m, n) for m in (inner.qkv, inner.z, inner.b, inner.a))
        return replace(inner, qkv=qkv, z=z, b=b, a=a, out=_rows(inner.out, n), value_heads=heads)
    if isinstance(inner, Mla):
        return replace(inner, q_b=_columns(inner.q_b, n), kv_b=_columns(inner.kv_b, n), o=_rows(inner.o, n),
                       heads=_divide("attention heads", inner.heads, n))
    if isinstance(inner, Mlp):
        return replace(inner, up=_columns(inner.up, n), down=_rows(inner.down, n),
                       gate=None if inner.gate is None else _columns(inner.gate, n))
    assert isinstance(inner, Moe)
    gate, up, down = inner.shared_gate, inner.shared_up, inner.shared_down
    return replace(inner, gate=_columns(inner.gate, n), up=_columns(inner.up, n), down=_rows(inner.down, n),
                   shared_gate=None if gate is None else _columns(gate, n), shared_up=None if up is None else _columns(up, n),
                   shared_down=None if down is None else _rows(down, n))


def _kv_heads(heads: int, n: int) -> int:
    """Of one device: each holds at least one, a copy where there are fewer heads than devices."""
    if heads >= n:
        return _divide("KV heads", heads, n)
    if n % heads:
        raise ConfigError(f"{heads} KV heads cannot be shared by {n} devices; valid: multiples and divisors of {heads}")
    return 1


def _columns(m: Matrix, n: int, pad: bool = False) -> Matrix:
    """A share of the outputs; pad: round up, as vocabularies are."""
    rows = -(-m.rows // n) if pad else _divide("outputs of a matrix", m.rows, n)
    return replace(m, rows=rows, nbytes=-(-m.nbytes * rows // m.rows))


def _rows(m: Matrix, n: int) -> Matrix:
    """A share of the inputs."""
    return replace(m, cols=_divide("inputs of a matrix", m.cols, n), nbytes=-(-m.nbytes // n))


def _divide(what: str, count: int, n: int) -> int:
    if count % n:
        raise ConfigError(f"{count} {what} cannot be shared by {n} devices; tensor parallelism needs a divisor of {count}")
    return count // n
