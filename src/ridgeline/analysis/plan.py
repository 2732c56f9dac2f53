"""A model on a machine, neither of which is here: does it fit, how fast does it decode, where does batching stop helping."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.analysis.cost import count
from ridgeline.analysis.forms import BatchLimits
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.predict import Predicted, predict, step_seconds
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.shard import sharded
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.work import decode

NEAR = 0.9                         # of the most tokens a second that any batch gives: more sequences are not worth their wait
MOST_BATCH = 1 << 14


@dataclass(frozen=True)
class Plan:
    """spec: the share of one of `devices` that cut each layer among them; hardware: one of them."""

    name: str
    spec: Spec
    hardware: Hardware
    devices: int = 1
    quantization: str | None = None

    @property
    def missing_bytes(self) -> int:
        """What each device lacks to hold its share of the weights; 0 where they fit."""
        return max(0, self.spec.weight_bytes - self.hardware.memory_bytes)

    @property
    def fits(self) -> bool:
        return not self.missing_bytes

    @property
    def cache_tokens(self) -> int:
        """Positions, of all sequences, whose keys and values fit beside the weights."""
        free, each = self.hardware.memory_bytes - self.spec.weight_bytes, self.spec.kv_bytes_per_token()
        return max(0, free // each) if each else 0

    def verdict(self) -> str:
        """Whether it fits, and by how much."""
        kind = f", {self.quantization}" if self.quantization else ""
        machine = self.hardware.name if self.devices == 1 else f"each of {self.devices} {self.hardware.name}"
        weights, memory = self.spec.weight_bytes / 1e9, self.hardware.memory_bytes / 1e9
        said = f"{self.name}{kind}: {weights:.1f} GB of weights, and {machine} has {memory:.1f} GB"
        if not self.fits:
            return f"{said}: it does not fit, {self.missing_bytes / 1e9:.1f} GB are missing"
        return f"{said}: it fits, with room for the keys and values of {self.cache_tokens:,} tokens"

    def predict(self, batch: int, context: int) -> list[Predicted]:
        """The works of a decoding step on one device, with their seconds."""
        return predict(count(self.spec, decode(context, batch=batch)), self.hardware)

    def decode_s(self, batch: int, context: int) -> float:
        """Seconds between two tokens of each of `batch` sequences with `context` cached tokens, at the machine's roofs."""
        return step_seconds(self.predict(batch, context))

    def roofs(self, context: int) -> BatchLimits:
        """Sequences at which matrices take as long to multiply as to read, at which keys and values are as many bytes as
        weights, and that fit the memory."""
        spec, hardware = self.spec, self.hardware
        read = [work for work in count(spec, decode(context)) if work.kind == "linear"]
        weights, parameters = sum(w.weight_bytes for w in read), sum(w.flops for w in read) / 2
        peak = min(hardware.peak(w.compute) for w in read)
        kv = sum(w.kv_bytes for w in count(spec, decode(context)))
        return BatchLimits(peak * weights / (2 * parameters * hardware.bandwidth), weights / kv if kv else float("inf"),
                           self.cache_tokens / (context + 1) if kv else float("inf"))

    def stops(self, context: int) -> int:
        """Sequences from which on more bring little: nine tenths of the most tokens a second of any batch. Whether so many fit
        the memory is another question: `roofs`."""
        most = max(self._rate(1 << i, context) for i in range(MOST_BATCH.bit_length()))
        low, high = 1, MOST_BATCH
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rate(middle, context) >= NEAR * most else (middle + 1, high)
        return low

    def _rate(self, batch: int, context: int) -> float:
        return batch / self.decode_s(batch, context)


def plan(raw: Mapping[str, Any], hardware: Hardware, *, name: str = "model", quantization: str | None = None, devices: int = 1,
         kv_dtype: str = "bfloat16") -> Plan:
    """raw: a config.json; devices: that share each layer. On a GPU kernels are fused, activations and products 16-bit whatever
    the weights are stored in; on a CPU they are ours.

    raises UnsupportedModel for a config that is not known, ConfigError where layers cannot be cut into so many parts.
    """
    how: dict[str, Any] = {"kernels": "native", "stream": 4, "precision": "int8"}
    if hardware.device != "cpu":
        how = {"kernels": "fused", "stream": 2, "precision": "bfloat16" if "bfloat16" in hardware.peaks else "float16"}
    spec = plan_of(raw, name=name, quantization=quantization, kv_dtype=kv_dtype, **how)
    return Plan(name, sharded(spec, devices), hardware, devices, quantization)
