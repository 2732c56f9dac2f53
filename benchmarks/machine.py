"""What a figure was measured on, and with."""
from __future__ import annotations

import os
import platform
from typing import Any

import torch

import ridgeline
from ridgeline.bench.machine import cpu_name


def describe() -> dict[str, Any]:
    """cores: those this process may use; load: the machine's one-minute load average before the run."""
    return {
        "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__, "python": platform.python_version(), "ridgeline": ridgeline.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def line(machine: dict[str, Any]) -> str:
    return (f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads, torch "
            f"{machine['torch']}, Python {machine['python']}, ridgeline {machine['ridgeline']}, load {machine['load']}")


def warn_if_busy(machine: dict[str, Any]) -> str | None:
    """A machine that does something else measures that as well."""
    if machine["load"] > 0.5:
        return f"the machine was busy before the run (load average {machine['load']}): do not quote these figures"
    return None

