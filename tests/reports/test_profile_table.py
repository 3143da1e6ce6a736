"""The printed table of a profile."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from torch import nn

from packprop import Profile
from packprop.applications.reports.profile.assembly import TOTAL
from packprop.applications.reports.profile.layers import Layer, Spectrum
from packprop.applications.reports.profile.table import number_text
from tests.reports.profiled import network, quiet


def line_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_the_table_says_what_was_found() -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data)
    text = str(found)
    for row, name in [*((layer, layer.name) for layer in found.layers), (found.total, "total")]:
        cells = line_of(text, name)
        assert cells[1] == str(row.parameters)
        shown = [float(cell) for cell in cells[2:8]]
        numbers = [
            row.gradient_norm,
            row.sample_gradient_norm_median,
            row.sample_gradient_norm_95,
            row.signal_to_noise,
            row.ggn_trace_exact,
            row.ggn_trace_monte_carlo,
        ]
        assert shown == pytest.approx(numbers, rel=0.05)
    assert line_of(text, "head")[-1] == "2/3"
    assert line_of(text, "norm")[-2] == "-"
    facts = f"Network: CrossEntropyLoss {found.loss:.3g}, 12 samples in 1 batch, evaluation mode"
    assert facts in text


def drawn_number(source: random.Random) -> float | None:
    return source.choice([None, 0.0, math.nan, 10 ** source.uniform(-30, 30)])


@pytest.mark.parametrize("seed", range(5))
def test_the_table_fits_and_loses_nothing(seed: int) -> None:
    """100 columns, whatever the sizes of the numbers and the lengths of the names."""
    source = random.Random(seed)
    layers = []
    for place in range(6):
        name = ".".join(source.choice(["encoder", "layer", "attention", "0"]) for _ in range(8))
        numbers = [drawn_number(source) for _ in range(6)]
        sizes = (source.randrange(1, 2049) for _ in range(2))
        factors = {
            f"weight.{side}": Spectrum(size, True, size - 1, 1.0, 1.0, 10 ** source.uniform(0, 12))
            for side, size in zip("AB", sizes, strict=True)
        }
        layers.append(Layer(f"{place}.{name}", "Linear", 10**place * 1234, *numbers, factors))
    settings = {
        "model": "Model",
        "loss": "MSELoss",
        "device": "cuda:0",
        "precision": "bfloat16",
        "mode": "evaluation",
        "monte_carlo_samples": 100,
    }
    total = dataclasses.replace(layers[-1], name=TOTAL, factors={})
    found = Profile(layers, total, 1.5, 10**6, 10**4, settings, 1.0)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "…" not in text
    table = text[: text.index("Model: MSELoss")]
    width = max(line.count("─") for line in table.splitlines())
    names = "".join(line.split(" ")[0] for line in table.splitlines())
    assert width == max(map(len, table.splitlines()))
    for layer in layers:
        assert layer.name in names
        for spectrum in layer.factors.values():
            assert number_text(spectrum.condition) in table
            assert f"{spectrum.rank}/{spectrum.size}" in table
        assert f"{layer.parameters:,}" in table
        assert all(number_text(value) in table for value in dataclasses.astuple(layer)[3:9])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (1.0, "1.00"),
        (0.19, "0.190"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1000"),
        (99999.4, "99999"),
        (123456.0, "1.2e5"),
        (0.00999, "1.0e-2"),
        (0.01, "0.0100"),
        (-0.5, "-0.500"),
        (3.14e-27, "3.1e-27"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text
