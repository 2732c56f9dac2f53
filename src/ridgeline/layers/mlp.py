"""Feed-forward layers. Every layer receives the batch: adapters differ by row."""
from __future__ import annotations

from torch import Tensor, nn

from ridgeline.batch import Batch
from ridgeline.errors import UnsupportedModel
from ridgeline.ops import reference as ops


def activation(name: str):  # type: ignore[no-untyped-def]  # a torch function; its stubs are untyped
    if name not in ops.ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not known; known: {', '.join(sorted(ops.ACTIVATIONS))}")
    return ops.ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), SwiGLU or GeGLU. arXiv 2002.05202."""

    def __init__(self, hidden: int, intermediate: int, act: str, *, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_name, self.act = act, activation(act)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class MLP(nn.Module):
    """down(act(up(x))) with biases, as in GPT-2."""

    def __init__(self, hidden: int, intermediate: int, act: str):
        super().__init__()
        self.up_proj = nn.Linear(hidden, intermediate)
        self.down_proj = nn.Linear(intermediate, hidden)
        self.act_name, self.act = act, activation(act)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        out: Tensor = self.down_proj(self.act(self.up_proj(x)))
        return out
