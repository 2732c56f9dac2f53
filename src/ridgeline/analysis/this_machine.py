"""This machine, calibrated for a loaded model and for what its levers would make of it."""
from __future__ import annotations

from ridgeline.analysis.calibration import SpeedProbe, calibrate, calibrate_for
from ridgeline.analysis.hardware import Hardware, Speed
from ridgeline.errors import ConfigError
from ridgeline.loading import LoadedModel

FLOATS = {"F32", "F16", "BF16"}
QUANTISED = ("Q8_0", "Q4_0")        # what int8 and int4 make of float weights


def machine_for(loaded: LoadedModel, precision: str, *, recalibrate: bool = False) -> Hardware:
    """With the costs of the model's weights and cache, of an int8 cache, and of quantised weights where the model's are floats.

    precision: of activations in products. Takes seconds where something of it was not measured before.
    """
    if loaded.report is None:
        return calibrate_for(loaded, precision=precision, recalibrate=recalibrate)
    kinds = {kind for layer in loaded.report.layers for kind in layer.kinds}
    if kinds & FLOATS:
        kinds.update(QUANTISED)
    own = str(loaded.layout.kv_dtype).removeprefix("torch.")
    return calibrate(sorted(kinds), kv_dtypes=tuple(dict.fromkeys((own, "int8"))), precision=precision,
                     threads=loaded.report.threads, isa=loaded.report.isa, recalibrate=recalibrate)


def speed_of(hardware: Hardware) -> Speed | None:
    """How fast the machine is now beside when it was calibrated; None where that cannot be told."""
    try:
        return SpeedProbe(hardware).now()
    except ConfigError:
        return None
