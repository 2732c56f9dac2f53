"""Bytes of activations that each component of a layer moves for one row: what differs between the two countings, and between
our kernels, fused ones of a GPU and plain torch operations. Sizes d, n, f are elements of a row."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

BLOCK = 32                     # columns that share a scale of int8 activations


class Traffic(ABC):
    """Bytes a row. `norm` is from the residual stream to what the products read; `product` reads n inputs and writes m outputs;
    `residual` adds d elements to the stream."""

    @abstractmethod
    def norm(self, d: int, form: str, before: bool) -> int: ...

    @abstractmethod
    def qkv(self, d: int, out: int, form: str, products: int = 3) -> int: ...

    @abstractmethod
    def heads(self, queries_keys: int, values: int, operations: int) -> int:
        """Norm and rotation of queries and keys, and values on their way to the cache. operations: passes over the former."""

    @abstractmethod
    def core(self, queries: int, out: int) -> int: ...

    @abstractmethod
    def out(self, n: int, d: int, form: str) -> int: ...

    @abstractmethod
    def residual(self, d: int, after: bool) -> int: ...

    @abstractmethod
    def up(self, d: int, f: int, gated: bool, form: str, next_form: str) -> int: ...

    @abstractmethod
    def down(self, f: int, d: int, form: str) -> int: ...

    @abstractmethod
    def elements(self, n: int) -> int:
        """n elements read or written in the stream's type."""


@dataclass(frozen=True)
class Chapter(Traffic):
    """The closed forms: 16-bit activations, each tensor counted once: an MLP's intermediates where they are written, queries
    and the attention's output in its core."""

    def norm(self, d: int, form: str, before: bool) -> int:
        return 4 * d if before else 0

    def qkv(self, d: int, out: int, form: str, products: int = 3) -> int:
        return 2 * d

    def heads(self, queries_keys: int, values: int, operations: int) -> int:
        return 0

    def core(self, queries: int, out: int) -> int:
        return 2 * (queries + out)

    def out(self, n: int, d: int, form: str) -> int:
        return 2 * d

    def residual(self, d: int, after: bool) -> int:
        return 0

    def up(self, d: int, f: int, gated: bool, form: str, next_form: str) -> int:
        return 2 * d + 2 * f * (1 + gated)

    def down(self, f: int, d: int, form: str) -> int:
        return 2 * d

    def elements(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Fused(Traffic):
    """One kernel a component; it reads its input once and writes its output once, `size` bytes an element."""

    size: int = 2

    def norm(self, d: int, form: str, before: bool) -> int:
        return 2 * self.size * d if before else 0

    def qkv(self, d: int, out: int, form: str, products: int = 3) -> int:
        return self.size * (d + out)

    def heads(self, queries_keys: int, values: int, operations: int) -> int:
        """Queries and keys read; queries written, keys and values to the cache (counted there)."""
        return self.size * (2 * queries_keys * bool(operations) + values)

    def core(self, queries: int, out: int) -> int:
        return self.size * (queries + out)

    def out(self, n: int, d: int, form: str) -> int:
        return self.size * (n + d)

    def residual(self, d: int, after: bool) -> int:
        return self.size * 3 * d

    def up(self, d: int, f: int, gated: bool, form: str, next_form: str) -> int:
        return self.size * (d + f)

    def down(self, f: int, d: int, form: str) -> int:
        return self.size * (f + d)

    def elements(self, n: int) -> int:
        return self.size * n


@dataclass(frozen=True)
class Torch(Fused):
    """The reference layers: one kernel an operation, so intermediates are written and read again."""

    def qkv(self, d: int, out: int, form: str, products: int = 3) -> int:
        return self.size * (products * d + out)

    def heads(self, queries_keys: int, values: int, operations: int) -> int:
        return self.size * (2 * queries_keys * operations + values)

    def residual(self, d: int, after: bool) -> int:
        return self.size * (3 + 2 * after) * d

    def up(self, d: int, f: int, gated: bool, form: str, next_form: str) -> int:
        """Each product reads x and writes; the activation reads and writes; the factors are read and their product written."""
        return self.size * (2 * d + 7 * f) if gated else self.size * (d + 3 * f)


@dataclass(frozen=True)
class Native(Traffic):
    """Our kernels on a CPU: fp32 rows, and beside them the form that a product reads (csrc/blocks.cc)."""

    def norm(self, d: int, form: str, before: bool) -> int:
        return 4 * d + self._prepare(d, form)             # without a norm the rows are copied

    def _prepare(self, n: int, form: str) -> int:
        """fp32 written, and read once more where it is brought to another form."""
        return 4 * n if form == "float32" else 8 * n + form_bytes(n, form)

    def qkv(self, d: int, out: int, form: str, products: int = 3) -> int:
        return form_bytes(d, form) + 4 * out

    def heads(self, queries_keys: int, values: int, operations: int) -> int:
        return 8 * queries_keys * operations + 4 * values

    def core(self, queries: int, out: int) -> int:
        return 4 * (queries + out)

    def out(self, n: int, d: int, form: str) -> int:
        prepared = 0 if form == "float32" else 4 * n + form_bytes(n, form)
        return prepared + form_bytes(n, form) + 4 * d

    def residual(self, d: int, after: bool) -> int:
        return 12 * d

    def up(self, d: int, f: int, gated: bool, form: str, next_form: str) -> int:
        """Products written, read and written again by the activation, then brought to the next product's form."""
        prepared = 0 if next_form == "float32" else 4 * f + form_bytes(f, next_form)
        return (1 + gated) * form_bytes(d, form) + 4 * f * (5 if gated else 3) + prepared

    def down(self, f: int, d: int, form: str) -> int:
        return form_bytes(f, form) + 4 * d

    def elements(self, n: int) -> int:
        return 4 * n


def form_bytes(n: int, form: str) -> int:
    """Of a row of n activations as a product reads it: int8 with a scale and two sums for each block, bfloat16 or float32."""
    blocks = -(-n // BLOCK)
    return {"int8": blocks * (BLOCK + 4 + 8), "bfloat16": 2 * n}.get(form, 4 * n)
