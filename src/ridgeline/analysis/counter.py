"""What the costs of all layers of one pass share: its rows, the model, how it is counted."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.analysis.spec import Matrix, Part, Spec
from ridgeline.analysis.traffic import Chapter, Fused, Native, Torch, Traffic
from ridgeline.analysis.work import Rows, Work

FLOAT_KINDS = ("f32", "f16", "bf16")
CHAPTER_ITEMSIZE = 2               # bytes of all that the closed forms count
PRUNED_ROWS = 4                    # up to which a split head is read by halves (native/head.py), and its low halves' share
PRUNED_SCORED = 0.03
NORM_OPERATIONS = 4                # of an element: square, add, scale, weight


@dataclass(frozen=True)
class Counter:
    """What the costs of all layers of one pass share."""

    spec: Spec
    rows: Sequence[Rows]
    chapter: bool

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.rows)

    @property
    def wanted(self) -> int:
        return sum(r.wanted for r in self.rows)

    def traffic(self, native: bool) -> Traffic:
        if self.chapter:
            return Chapter()
        if self.spec.kernels == "fused":
            return Fused(self.spec.stream)
        return Native() if native and self.spec.kernels == "native" else Torch(self.spec.stream)

    def form(self, matrix: Matrix, native: bool) -> str:
        """The arithmetic of a product: quantised weights in int8 or exactly, bfloat16 ones in bfloat16 or exactly."""
        if self.chapter:
            return "bfloat16"
        if self.spec.kernels != "native" or not native:
            return self.spec.precision if self.spec.stream == 2 else "float32"
        if matrix.kind not in FLOAT_KINDS:
            return "int8" if self.spec.precision == "int8" else "float32"
        return "bfloat16" if matrix.kind == "bf16" and self.spec.precision != "float32" else "float32"

    def attention_compute(self) -> str:
        """Our kernels multiply keys and values of 16 bits and less as bfloat16 pairs."""
        if self.chapter:
            return "bfloat16"
        if self.spec.kernels == "fused":
            return self.spec.precision
        return "bfloat16" if self.spec.kv_dtype in ("bfloat16", "int8") and self.spec.precision != "float32" else "float32"

    def weights(self, *matrices: Matrix) -> dict[str, Any]:
        """Fields of a Work: bytes and type of these matrices."""
        if self.chapter:
            return {"weight_bytes": CHAPTER_ITEMSIZE * sum(m.parameters for m in matrices), "weight_type": "bf16"}
        sizes: dict[str, int] = {}
        for m in matrices:
            sizes[m.kind] = sizes.get(m.kind, 0) + m.nbytes
        return {"weight_bytes": sum(sizes.values()), "weight_type": max(sizes, key=lambda kind: sizes[kind])}

    def shape(self, native: bool, *sizes: int) -> tuple[int, ...]:
        """What a measured cost is looked up by; nothing for layers that are left to torch among native ones."""
        return sizes if native or self.spec.kernels != "native" else ()

    def linear(self, layer: int | None, component: str, rows: int, moved: int, native: bool, *matrices: Matrix,
               activated: int = 0) -> Work:
        return Work(layer, component, "linear", rows, 2 * rows * sum(m.parameters for m in matrices),
                    activation_bytes=rows * moved, compute=self.form(matrices[0], native), **self.weights(*matrices),
                    shape=self.shape(native, sum(m.rows for m in matrices), matrices[0].cols, activated))

    def elementwise(self, layer: int | None, component: str, rows: int, flops: int, moved: int, width: int, norm: bool,
                    native: bool = True) -> Work:
        return Work(layer, component, "elementwise", rows, rows * flops, activation_bytes=rows * moved,
                    shape=self.shape(native, width, norm))

    def norm(self, layer: int, component: str, part: Part, form: str) -> Work:
        d = self.spec.hidden
        return self.elementwise(layer, component, self.tokens, NORM_OPERATIONS * d * part.before,
                                self.traffic(part.native).norm(d, form, part.before), d, part.before, part.native)

    def residual(self, layer: int, component: str, part: Part) -> Work:
        d = self.spec.hidden
        return self.elementwise(layer, component, self.tokens, d * (1 + NORM_OPERATIONS * part.after),
                                self.traffic(part.native).residual(d, part.after), d, part.after, part.native)

    def collective(self, layer: int | None, component: str, rows: int, elements: int, passes: int) -> list[Work]:
        """What each of several devices sends so that all have the sum (two passes of a ring) or all parts (one) of `elements` a
        row; nothing on one device. shape: devices, messages one after the other."""
        devices = self.spec.parallel
        if devices == 1:
            return []
        itemsize = CHAPTER_ITEMSIZE if self.chapter else self.spec.stream
        moved = -(-passes * (devices - 1) * rows * elements * itemsize // devices)
        return [Work(layer, component, "collective", rows, 0, activation_bytes=moved, shape=(devices, passes * (devices - 1)))]

    def shared(self, works: list[Work]) -> list[Work]:
        """A residual step whose last product each device has a part of: the parts are added up before the residual."""
        *before, residual = works
        block = residual.component.partition(".")[0]
        return [*before, *self.collective(residual.layer, f"{block}.allreduce", self.tokens, self.spec.hidden, 2), residual]

    def embed(self) -> list[Work]:
        matrix, d = self.spec.embed, self.spec.hidden
        row = CHAPTER_ITEMSIZE * d if self.chapter else -(-matrix.nbytes // matrix.rows)
        return [Work(None, "embed", "lookup", self.tokens, 0, weight_bytes=self.tokens * row,
                     activation_bytes=self.tokens * self.traffic(True).elements(d),
                     weight_type="bf16" if self.chapter else matrix.kind),
                *self.collective(None, "embed.allreduce", self.tokens, d, 2)]

    def head_bytes(self) -> int:
        """Of the head's weights that are read: for few rows of a split one, one half of the codes, and little of the other."""
        head = self.spec.head
        if self.chapter:
            return CHAPTER_ITEMSIZE * head.parameters
        if not self.spec.head_split or self.wanted > PRUNED_ROWS:
            return head.nbytes
        return round(head.nbytes - (1 - PRUNED_SCORED) * head.parameters / 2)

    def ends(self) -> list[Work]:
        """The final norm, the head and the choice of tokens, for the rows that are wanted alone.

        The head's logits are written by the chapter's count only: the best tokens are found strip by strip.
        """
        if not self.wanted:
            return []
        spec, traffic = self.spec, self.traffic(True)
        logits = traffic.elements(spec.vocab) if self.chapter else 0
        head = self.linear(None, "head", self.wanted, traffic.elements(spec.hidden) + logits, True, spec.head)
        return [
            self.elementwise(None, "final_norm", self.wanted, NORM_OPERATIONS * spec.hidden, traffic.elements(2 * spec.hidden),
                             spec.hidden, True),
            replace(head, weight_bytes=self.head_bytes()),
            *self.collective(None, "head.allgather", self.wanted, spec.vocab, 1),
            self.elementwise(None, "sample", self.wanted, spec.vocab, logits, spec.vocab, False)]
