"""Fill a model that was built on the meta device from a checkpoint, one tensor at a time.

At no time are two copies of the weights in memory: a parameter either aliases the mapped file or is converted from
it, and converted pages are given back to the system.
"""
from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from ridgeline.errors import CorruptFile, ModelError
from ridgeline.weights.checkpoint import Checkpoint, Packed
from ridgeline.weights.dummy import dummy_tensor
from ridgeline.weights.mapping import From

_log = logging.getLogger(__name__)

# Tensors that a checkpoint may hold and a text model does not need: buffers that old versions saved, the towers of
# multimodal models, and multi-token prediction layers.
_HARMLESS = re.compile(
    r".*\brotary_emb\.inv_freq|.*\.attn\.(bias|masked_bias)"
    r"|(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*"
    r"|mtp\..*"
)


@dataclass
class _Slot:
    """A parameter or buffer of the model, and every place that shares it."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    taken: Collection[str] = (),
) -> None:
    """Replace the parameters and persistent buffers of `model` (on the meta device) by the checkpoint's tensors.

    Where a parameter comes from is `model.sources()[name]` if the model has that method and lists the name, else
    the tensor of the same name. A parameter shared by several modules is read once and stays shared. A parameter
    with the attribute `keep_fp32 = True` stays float32; integer buffers keep their type. Buffers that are not
    persistent are the model's own business. `progress(done, total)` counts bytes of the file. `taken` names tensors that
    somebody else has read from the checkpoint already, so that they do not count as left over.

    Raises ModelError (missing tensors) and CorruptFile (wrong shape). Tensors left over are logged as a warning
    unless known to be harmless.
    """
    slots = _slots(model)
    if checkpoint.format == "dummy":
        _fill_dummy(slots, dtype, device, progress)
        return
    sources = _sources(model)
    plan = _plan(slots, sources, checkpoint)
    held = set(checkpoint.names())
    _warn_of_leftovers(checkpoint, held - set(taken) - {sources.get(n, From(n)).name for slot in slots for n in slot.names})

    costs = [_cost(checkpoint, source) for _, source in plan]
    done = 0
    for (slot, source), cost in zip(plan, costs):
        _check_shape(checkpoint, source, tuple(slot.tensor.shape), slot.names[0])
        _place(slot, read_source(checkpoint, source, _dtype_of(slot.tensor, dtype), device))
        done += cost
        if progress is not None:
            progress(done, sum(costs))


def check_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Find out whether load_weights would succeed, from the headers alone. Raises ModelError and CorruptFile as it does."""
    if checkpoint.format == "dummy":
        return
    for slot, source in _plan(_slots(model), _sources(model), checkpoint):
        _check_shape(checkpoint, source, tuple(slot.tensor.shape), slot.names[0])


def read_source(
    checkpoint: Checkpoint, source: From, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The tensor that `source` describes: sliced, or transposed and then sliced."""
    if not source.transpose:
        return checkpoint.read(source.name, dtype, device, rows=source.rows)
    tensor = checkpoint.read(source.name, dtype, device).T  # (out, in)
    if source.rows is not None:
        tensor = tensor[source.rows[0] : source.rows[1]]
    return tensor.contiguous()


def packed_source(checkpoint: Checkpoint, source: From) -> Packed | None:
    """The stored blocks of what `source` describes, or None where the checkpoint has none: see Checkpoint.packed."""
    packed = checkpoint.packed(source.name, transpose=source.transpose)
    if packed is None or source.rows is None:
        return packed
    low, high = source.rows
    return Packed(packed.type, (high - low, *packed.shape[1:]), packed.raw[low:high])


def _sources(model: nn.Module) -> dict[str, From]:
    declared = getattr(model, "sources", None)
    return declared() if callable(declared) else {}


def _plan(slots: list[_Slot], sources: dict[str, From], checkpoint: Checkpoint) -> list[tuple[_Slot, From]]:
    """What fills each slot. Raises ModelError."""
    held = set(checkpoint.names())
    plan: list[tuple[_Slot, From]] = []
    missing: list[str] = []
    for slot in slots:
        candidates = [sources.get(name, From(name)) for name in slot.names]
        found = next((source for source in candidates if source.name in held), None)
        if found is None:
            missing.append(candidates[0].name)
        else:
            plan.append((slot, found))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(f"{checkpoint.path}: {len(missing)} tensors are missing: {shown}")
    return plan


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        persistent = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for leaf, tensor in [*module._parameters.items(), *persistent.items()]:
            if tensor is None:
                continue
            slot = slots.setdefault(id(tensor), _Slot(tensor))
            slot.names.append(f"{prefix}.{leaf}" if prefix else leaf)
            slot.places.append((module, leaf))
    return list(slots.values())


def _dtype_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    if not tensor.dtype.is_floating_point:
        return tensor.dtype
    return torch.float32 if getattr(tensor, "keep_fp32", False) else dtype


def _place(slot: _Slot, value: torch.Tensor) -> None:
    if isinstance(slot.tensor, nn.Parameter):
        parameter = nn.Parameter(value, requires_grad=slot.tensor.requires_grad)
        parameter.__dict__.update(slot.tensor.__dict__)  # keep_fp32 and whatever else the model marked it with
        value = parameter
    for module, leaf in slot.places:
        setattr(module, leaf, value)


def _fill_dummy(
    slots: list[_Slot], dtype: torch.dtype, device: str, progress: Callable[[int, int], None] | None
) -> None:
    total = sum(slot.tensor.numel() for slot in slots) * dtype.itemsize
    done = 0
    for slot in slots:
        _place(slot, dummy_tensor(slot.names[0], slot.tensor.shape, _dtype_of(slot.tensor, dtype), device))
        done += slot.tensor.numel() * dtype.itemsize
        if progress is not None:
            progress(done, total)


def _cost(checkpoint: Checkpoint, source: From) -> int:
    """Bytes of the file that reading this source takes; a slice takes its share."""
    size = checkpoint.nbytes(source.name)
    if source.rows is None:
        return size
    shape = checkpoint.shape(source.name)
    return size * (source.rows[1] - source.rows[0]) // max(1, shape[-1 if source.transpose else 0])


def _check_shape(checkpoint: Checkpoint, source: From, expected: tuple[int, ...], name: str) -> None:
    found = checkpoint.shape(source.name)
    whole = found[::-1] if source.transpose else found
    if source.rows is None:
        fits = whole == expected
    else:
        low, high = source.rows
        fits = high <= whole[0] and (high - low, *whole[1:]) == expected
    if not fits:
        part = f"rows {source.rows[0]} to {source.rows[1]} of " if source.rows else ""
        raise CorruptFile(
            f"{checkpoint.path}: tensor {source.name!r} has the shape {list(found)} ({math.prod(found)} values); "
            f"{name} needs {part}a shape that gives {list(expected)}"
        )


def _warn_of_leftovers(checkpoint: Checkpoint, names: set[str]) -> None:
    unused = sorted(name for name in names if _HARMLESS.fullmatch(name) is None)
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        _log.warning("%s: %d tensors are not used: %s%s", checkpoint.path, len(unused), ", ".join(unused[:5]), more)
