"""The tensors of one role: KV pages and recurrent states, as the layers read them."""
from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.types import LayerState, PagedKV, Recurrent, Shared

HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class RoleLayout:
    """What the model that plays one role keeps: one state per layer, the dtype of K and V, the model's fingerprint."""

    layers: tuple[LayerState, ...]
    kv_dtype: torch.dtype
    fingerprint: str

    @property
    def paged(self) -> bool:
        return any(isinstance(layer, PagedKV) for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, Recurrent) for layer in self.layers)

    def donors(self, own: str) -> tuple[str, ...]:
        """Other roles whose pages this role's `Shared` layers read."""
        return tuple(sorted({s.role for s in self.layers if isinstance(s, Shared) and s.role != own}))

    def kv_bytes_per_token(self) -> int:
        return sum(kv_bytes(s, self.kv_dtype) for s in self.layers if isinstance(s, PagedKV))

    def state_bytes(self) -> int:
        """Bytes of one snapshot: the state of one sequence at one position, all layers."""
        return sum(
            math.prod(shape) * dtype_named(dtype).itemsize
            for s in self.layers if isinstance(s, Recurrent) for _, shape, dtype in s.tensors
        )


def kv_bytes(spec: PagedKV, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in one layer, the scales of int8 included."""
    scales = 2 * spec.heads * torch.float32.itemsize if dtype == torch.int8 else 0
    return spec.elements_per_token() * dtype.itemsize + scales


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"recurrent state: {name!r} is not the name of a torch dtype")
    return dtype


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked key's weight 0 times an uninitialised NaN is NaN.

    On a CPU with memory that the system zeroes at the first touch: a large cache costs nothing until it is used.
    """
    count = math.prod(shape)
    if device.type != "cpu" or count == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= HUGE_PAGE:
        # Attention reads small pages all over this memory: with 4 KB system pages 10 to 45 % slower than with 2 MB ones.
        with contextlib.suppress(OSError):             # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class CacheView:
    """What a model's layers get as `state`.

    K is (pages, heads, page_size, key_dim), V (pages, heads, page_size, value_dim), a recurrent tensor (slots, *shape). In
    int8, K and V have scales (pages, heads, page_size) in fp32: a row of K is about its scale times what is stored.
    """

    def __init__(
        self, role: str, layout: RoleLayout, *, page_size: int, num_pages: int, num_states: int, device: torch.device
    ) -> None:
        self.role, self.layout, self.page_size = role, layout, page_size
        self._kv: dict[int, tuple[Tensor, ...]] = {}           # K, V and, in int8, the scales of both
        self._states: dict[int, dict[str, Tensor]] = {}
        self._others: Mapping[str, CacheView] = {}
        for i, spec in enumerate(layout.layers):
            if isinstance(spec, PagedKV):
                shape = (num_pages, spec.heads, page_size)
                kv = [zeros((*shape, dim), layout.kv_dtype, device) for dim in (spec.key_dim, spec.value_dim)]
                if layout.kv_dtype == torch.int8:
                    kv += [zeros(shape, torch.float32, device) for _ in range(2)]
                self._kv[i] = tuple(kv)
            elif isinstance(spec, Recurrent):
                self._states[i] = {
                    name: zeros((num_states, *shape), dtype_named(dtype), device) for name, shape, dtype in spec.tensors
                }

    def link(self, views: Mapping[str, CacheView]) -> None:
        """Resolve `Shared` layers once all roles exist."""
        self._others = views
        for i, spec in enumerate(self.layout.layers):
            if isinstance(spec, Shared):
                self._kv[i] = self._resolve(spec, ())

    def _resolve(self, spec: Shared, seen: tuple[Shared, ...]) -> tuple[Tensor, ...]:
        view = self._others.get(spec.role)
        if view is None or not 0 <= spec.layer < len(view.layout.layers) or spec in seen:
            known = ", ".join(f"{r} ({len(v.layout.layers)} layers)" for r, v in self._others.items())
            raise ConfigError(f"role {self.role!r} shares layer {spec.layer} of role {spec.role!r}; there are: {known}")
        donor = view.layout.layers[spec.layer]
        if isinstance(donor, Shared):
            return view._resolve(donor, (*seen, spec))
        if not isinstance(donor, PagedKV):
            raise ConfigError(
                f"role {self.role!r} shares layer {spec.layer} of role {spec.role!r}, which keeps no keys and values")
        return view._kv[spec.layer]

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        assert layer in self._kv, f"layer {layer} of role {self.role!r} keeps no keys and values"
        k, v, *_ = self._kv[layer]
        return k, v

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of K and V, (pages, heads, page_size) fp32 each; None where the cache is not int8."""
        assert layer in self._kv, f"layer {layer} of role {self.role!r} keeps no keys and values"
        _, _, *found = self._kv[layer]
        return (found[0], found[1]) if found else None

    def recurrent(self, layer: int) -> dict[str, Tensor]:
        assert layer in self._states, f"layer {layer} of role {self.role!r} keeps no recurrent state"
        return self._states[layer]

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """The first `rows` rows of a page into another one, K, V and their scales of all layers that this role owns."""
        for i, spec in enumerate(self.layout.layers):
            if isinstance(spec, PagedKV):
                for x in self._kv[i]:
                    x[target, :, :rows] = x[source, :, :rows]

    def move_rows(self, pages: list[int], sources: Sequence[int], target: int) -> None:
        """Rows at the cache positions `sources` to the positions target, target + 1, ...; both through `pages`."""
        size = self.page_size
        to = range(target, target + len(sources))
        from_page, from_row = [pages[p // size] for p in sources], [p % size for p in sources]
        to_page, to_row = [pages[p // size] for p in to], [p % size for p in to]
        for i, spec in enumerate(self.layout.layers):
            if isinstance(spec, PagedKV):
                for x in self._kv[i]:
                    x[to_page, :, to_row] = x[from_page, :, from_row]  # (rows, heads[, dim]): gathered before written
