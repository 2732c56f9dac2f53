"""What the linear layers of a model see on a text: Gram matrices of their inputs, layer by layer."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.batch import whole
from ridgeline.models.base import CausalLM


@dataclass
class Shared:
    """Linear layers of one input, in the order in which they run, and the sum of x x^T over its rows: (cols, cols) fp32."""

    names: list[str]
    gram: Tensor


@torch.inference_mode()
def calibrate(model: CausalLM, sequences: Sequence[Sequence[int]], quantise: Callable[[str, nn.Module, list[Shared]], None],
              on_layer: Callable[[int, int], None] | None = None) -> None:
    """Run sequences through the model one decoder layer at a time; quantise(name, layer, inputs) may change the layer's
    weights, and the next layer sees what the changed one gives. Names of linear layers count from the decoder layer."""
    states = [model.embed(torch.tensor(ids)) for ids in sequences]             # (n, hidden) each
    layers = model.model.layers
    for index, layer in enumerate(layers):
        quantise(f"model.layers.{index}", layer, _inputs(layer, states))
        states = [layer(x, whole([len(x)]), None) for x in states]
        if on_layer is not None:
            on_layer(index + 1, len(layers))


def _inputs(layer: nn.Module, states: list[Tensor]) -> list[Shared]:
    found: dict[str, Shared] = {}
    seen: list[tuple[str, Tensor]] = []
    hooks = [module.register_forward_pre_hook(lambda _, inputs, name=name: seen.append((name, inputs[0])))
             for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    try:
        for x in states:
            layer(x, whole([len(x)]), None)
            shared: list[tuple[list[str], Tensor]] = []
            for name, rows in seen:
                # Kept alive in `seen`, so that equal addresses mean one tensor.
                same = next((names for names, other in shared if other.data_ptr() == rows.data_ptr()), None)
                if same is None:
                    shared.append(([name], rows))
                else:
                    same.append(name)
            for names, rows in shared:
                gram = rows.T @ rows                                           # (cols, cols)
                if names[0] in found:
                    found[names[0]].gram += gram
                else:
                    found[names[0]] = Shared(names, gram)
            seen.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())
