"""Measure this machine in some seconds, and remember it: what it reads, what our kernels take, what a call costs."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ridgeline
from ridgeline.analysis.hardware import Curve, Hardware, Level, Speed, dumps
from ridgeline.analysis.probes import (
    COLS,
    HEADS,
    PEAKS,
    ROUNDS,
    Attend,
    Between,
    Cache,
    Product,
    Trial,
    compute_of,
    peak,
    product_name,
)
from ridgeline.analysis.work import Rows
from ridgeline.bench.host import caches, cores, cpu_name, memory_bytes
from ridgeline.errors import ConfigError
from ridgeline.loading import LoadedModel

KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "BF16")       # that are measured unless a model says what it has
READ_BYTES = 256 << 20         # more than the caches of a machine hold
LEAST_COLD = 96 << 20
REFERENCE, SPEED_ROWS = "Q8_0", 96                     # whose products tell the machine's speed of a moment
PASSES = ((1, 1), (8, 1), (32, 1), (1, 64), (1, 256))       # sequences, tokens of each: what a pass costs beside its work
_log = logging.getLogger(__name__)


def calibrate(kinds: Iterable[str] = KINDS, *, kv_dtypes: Sequence[str] = ("bfloat16",), precision: str = "int8",
              threads: int = 0, isa: str = "", recalibrate: bool = False) -> Hardware:
    """This machine, as the native kernels use it. Measured where the cache of the user has nothing of this machine, build and
    number of threads, or lacks some of the kinds; `recalibrate` measures all again.

    kinds: stored types of weights; kv_dtypes, precision: of the cache and of the activations in products. Takes 2 to 15 s.
    raises ConfigError for an instruction set that the machine lacks or without the native extension.
    """
    engine = _engine(isa, threads)
    mark = fingerprint(engine)
    path = cache_folder() / f"{mark}.json"
    known = None if recalibrate else _read(path)
    cold = _cold()
    had = torch.get_num_threads()
    torch.set_num_threads(1)                               # its pool would spin on the cores that the kernels need
    try:
        hardware = _machine(engine, mark) if known is None else known
        curves = {c.kernel: c for c in hardware.curves}
        trials = list[Trial]()
        for kind, split in _with_split(kinds, engine):
            if product_name(kind, compute_of(kind, precision), COLS[0], split) not in curves:
                trials.append(Product(engine, kind, precision, cold, split))
        for dtype in kv_dtypes:
            if f"elementwise.heads.{dtype}" not in curves:
                cache = Cache.of(dtype, 2 * cold)
                trials += [Attend(engine, cache, precision, d, group) for d, group in HEADS]
                trials.append(Between(engine, cache, precision))
        for _ in range(ROUNDS):
            for trial in trials:
                trial.round()
        curves |= {curve.kernel: curve for trial in trials for curve in trial.curves()}
        if "pass" not in curves:
            curves |= {c.kernel: c for c in passes(threads)}
    finally:
        torch.set_num_threads(had)
    if tuple(curves.values()) != hardware.curves:
        hardware = replace(hardware, curves=tuple(curves.values()))
        _write(path, hardware)
    return hardware


def calibrate_for(loaded: LoadedModel, *, precision: str = "int8", recalibrate: bool = False) -> Hardware:
    """This machine as a loaded model uses it: with its threads, instruction set, weight types and cache."""
    report = loaded.report
    if report is None:
        from ridgeline.analysis.torch_probes import calibrate_torch

        return calibrate_torch(loaded.dtype, next(loaded.model.parameters()).device)
    kinds = sorted({kind for layer in report.layers for kind in layer.kinds})
    return calibrate(kinds, kv_dtypes=(str(loaded.layout.kv_dtype).removeprefix("torch."),), precision=precision,
                     threads=report.threads, isa=report.isa, recalibrate=recalibrate)


class SpeedProbe:
    """Tells how fast a calibrated machine is now, from the time of two products of its calibration. Holds 100 MB.

    The bandwidth of plain reads would not do: on one machine it moved from 35 to 58 GB/s, and products gained a tenth.
    """

    def __init__(self, hardware: Hardware):
        """raises ConfigError for a machine that is not this one or lacks the products."""
        curve = hardware.curve(product_name(REFERENCE, "int8", COLS[1]))
        engine = _engine(hardware.instruction_set or "", hardware.threads)
        if curve is None or hardware.fingerprint != fingerprint(engine):
            raise ConfigError(f"{hardware.name} is not this machine as calibrated with {REFERENCE} weights")
        self.curve, self.product = curve, Product(engine, REFERENCE, "int8", _cold(), cols=COLS[1:])

    def now(self) -> Speed:
        """In about 0.05 s; medians, so that the moment's disturbances count."""
        alone, many = (statistics.median(self.product.once(COLS[1], rows) for _ in range(5)) for rows in (1, SPEED_ROWS))
        return Speed(self.curve.at(1) / alone, self.curve.at(SPEED_ROWS) / many)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ridgeline/machines, or ~/.cache/ridgeline/machines."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ridgeline" / "machines"


def fingerprint(engine: Any) -> str:
    """Of the processor, its cores, the instruction set, the threads, this version and the build of the kernels."""
    from ridgeline.native import _native

    build = hashlib.blake2b(Path(_native.__file__).read_bytes(), digest_size=8).hexdigest()
    told = json.dumps([cpu_name(), cores(), engine.isa, engine.threads, ridgeline.__version__, build])
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


def _cold() -> int:
    """Bytes that the caches do not hold together."""
    return max(LEAST_COLD, 3 * max((c.total for c in caches()), default=0))


def _engine(isa: str, threads: int) -> Any:
    try:
        from ridgeline.native import _native
    except ImportError as error:
        raise ConfigError("the native backend was not built for this machine, so there are no kernels to measure") from error
    try:
        return _native.Engine(isa, threads)
    except ValueError as error:
        raise ConfigError(f"{error}; available: {', '.join(_native.available())}") from error


def _with_split(kinds: Iterable[str], engine: Any) -> list[tuple[str, bool]]:
    """A head in Q8_0 is kept in two planes where the kernels can prune it."""
    each = list(dict.fromkeys((REFERENCE, *kinds)))
    return [(kind, False) for kind in each] + ([("Q8_0", True)] if engine.prunes else [])


def _machine(engine: Any, mark: str) -> Hardware:
    load = os.getloadavg()[0]
    alone = _engine(engine.isa, 1)
    levels = []
    for cache in caches():
        for one, threads in dict.fromkeys(((alone, 1), (engine, engine.threads))):
            # Half of what these threads' caches hold: the rest of the machine uses them as well.
            size = max(cache.each // 2 * min(threads, max(1, cache.total // cache.each)), 512 * threads)
            repeats = max(1, (32 << 20) // size)
            levels.append(Level(cache.name, cache.total, threads, one.read_bandwidth(size, repeats)))
    memory = memory_bytes()
    levels += [Level("memory", memory, one.threads, one.read_bandwidth(READ_BYTES, 1)) for one in (alone, engine)]
    peaks = {compute: peak(engine, kind, compute) for compute, kind in PEAKS.items()}
    source = "measured by ridgeline's calibration"
    return Hardware(
        cpu_name(), levels[-1].bandwidth, peaks, memory, threads=engine.threads, instruction_set=engine.isa,
        dispatch_s=engine.fork_seconds(), barrier_s=engine.barrier_seconds(), fingerprint=mark, load=round(load, 2),
        sources=dict.fromkeys(("bandwidth", "peaks", "dispatch_s", "barrier_s", "levels", "curves"), source),
        levels=tuple(levels))


def passes(threads: int) -> list[Curve]:
    """What a step costs beside the work of its kernels, from a small model: building a batch, calls, choosing, scheduling.

    Its weights pass through the caches as a real one's do: Python that finds its data there takes a third of the time.

    "pass": within a pass, and "step": around it, in seconds by sequences that decode; the "prefill" ones by tokens of one.
    """
    from ridgeline.analysis.measure import DISPATCH, measure
    from ridgeline.llm import LLM

    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096}
    points: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(folder, load_format="dummy", backend="native", quantization="int8", threads=threads or None, progress=False,
                  skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20)
        for sequences, tokens in PASSES:
            found = measure(llm, [Rows(128 if tokens == 1 else 0, tokens, 1)] * sequences, repeats=10 if tokens == 1 else 3)
            size = float(sequences if tokens == 1 else tokens)
            stage = "" if tokens == 1 else "prefill."
            points.setdefault(f"{stage}pass", []).append((size, found.seconds[DISPATCH]))
            points.setdefault(f"{stage}step", []).append((size, found.step_s - found.pass_s))
    return [Curve(name, "s, by sequences or tokens", tuple(each)) for name, each in points.items()]


def _read(path: Path) -> Hardware | None:
    try:
        return Hardware.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, ConfigError) as error:
        _log.warning("%s: not a calibration that can be read, so the machine is measured again: %s", path, error)
        return None


def _write(path: Path, hardware: Hardware) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            file.write(dumps(hardware))
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("%s: the calibration cannot be kept: %s", path, error)
