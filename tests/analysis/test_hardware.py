"""Descriptions of machines: curves, peaks, their form as a file."""
from __future__ import annotations

import json
import math

import pytest

from ridgeline.analysis.hardware import Curve, Hardware, Level, dumps
from ridgeline.errors import ConfigError

CURVE = Curve("product.Q8_0.int8.512", "s", ((1.0, 2.0), (4.0, 8.0), (16.0, 8.0)))
MACHINE = Hardware("machine", 1e9, {"int8": 4e9, "float32": 1e9}, 1 << 30, threads=2, levels=(Level("L2", 1 << 20, 2, 5e9),),
                   curves=(CURVE,), sources={"bandwidth": "measured"}, price_per_hour=1.5)


@pytest.mark.parametrize("size, cost", [(0.5, 2), (1, 2), (2, 4), (3, 6), (4, 8), (7, 8), (16, 8), (99, 8)])
def test_a_curve_is_straight_in_logarithms_and_constant_beyond_its_ends(size, cost):
    assert CURVE.at(size) == pytest.approx(cost)


def test_a_curve_through_zero_steps():
    assert Curve("x", "s", ((1.0, 0.0), (2.0, 5.0))).at(1.5) == 5.0


def test_a_machine_survives_its_file():
    assert Hardware.from_json(json.loads(dumps(MACHINE))) == MACHINE


@pytest.mark.parametrize("found, told", [({}, "missing"), ({"curves": [{"kernel": "x"}]}, "'unit'"),
                                         ({**json.loads(dumps(MACHINE)), "speed": 3}, "speed")])
def test_no_description_of_a_machine(found, told):
    with pytest.raises(ConfigError, match=told):
        Hardware.from_json(found)


def test_missing_arithmetic_runs_in_the_next_wider_one():
    assert MACHINE.peak("int4") == MACHINE.peak("int8") == 4e9
    assert MACHINE.peak("bfloat16") == MACHINE.peak("float16") == 1e9
    assert MACHINE.ridge("int8") == 4 and not math.isclose(MACHINE.ridge("float32"), 4)
    with pytest.raises(ConfigError, match="no peak for 'float64' arithmetic; it has float32, int8"):
        MACHINE.peak("float64")
