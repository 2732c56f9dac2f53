"""The least time that a forward pass can take on a machine, from the shapes and the stored bytes of the loaded model."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ridgeline.analysis.cost import tally
from ridgeline.analysis.read import spec_of
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.work import Rows
from ridgeline.bench.machine import Machine
from ridgeline.config import EngineConfig
from ridgeline.loading import LoadedModel

Pass = Sequence[Rows]
READ = ("linear", "attention", "recurrent")        # what reads weights, keys or states, and computes products


@dataclass(frozen=True)
class Shape:
    """What a pass reads and computes: matrices as they lie in memory, keys and values, recurrent state. Activations, which stay
    in the caches of a machine, and what is done element by element do not count."""

    spec: Spec

    @classmethod
    def of(cls, loaded: LoadedModel, shapes: LoadedModel, config: EngineConfig) -> Shape:
        """loaded: with its weights; shapes: the same model before loading, where every matrix is still a torch module."""
        return cls(replace(spec_of(loaded, shapes, config), head_split=False))      # the limit reads the head whole

    @property
    def layer_parameters(self) -> int:
        return sum(m.parameters for m in self.spec.matrices)

    @property
    def layer_bytes(self) -> int:
        return sum(m.nbytes for m in self.spec.matrices)

    def bytes_read(self, rows: Pass) -> int:
        """Weights once, the head only if some row needs it; each cached key and value that a sequence's rows see, once; states
        are read and written."""
        sums = tally(self.spec, rows, kinds=READ)
        return sums.weight_bytes + sums.kv_bytes + sums.state_bytes

    def operations(self, rows: Pass) -> int:
        """Two a multiply-add of the matrices, and of the scores and sums of attention over the keys that are seen."""
        return tally(self.spec, rows, kinds=READ).useful

    def seconds(self, passes: Iterable[Pass], machine: Machine) -> float:
        """Each pass takes the longer of its reading and its computing."""
        return sum(max(self.bytes_read(p) / machine.bandwidth, self.operations(p) / machine.peak) for p in passes)
