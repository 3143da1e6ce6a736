"""A profile as a table for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from packprop.applications.reports.profile.layers import Layer

WIDTH = 100
"""The number of columns of a terminal that a printed profile needs."""

NAME_WIDTH = 12
"""The minimum width of names of layers, in columns; longer names are folded if there is no more room."""


def profile_table(layers: Sequence[Layer], total: Layer, room: int) -> Table:
    """Return the layers and their total, one row each, in at most ``room`` columns of a terminal."""
    titles = [
        "\nlayer",
        "para-\nmeters",
        "grad\nnorm",
        "sample\nmedian",
        "sample\n95%",
        "grad\nSNR",
        "GGN tr\nexact",
        "GGN tr\nMC",
        "KFAC cond\nA (inputs)",
        "KFAC cond\nB (outputs)",
    ]
    rows = [_cells(layer, layer.name) for layer in layers]
    last_row = [*_cells(total, "total")[:-2], "", ""]
    columns = list(zip(titles, *rows, last_row, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    numbers = sum(widths[1:])
    gap = 2 if NAME_WIDTH + numbers + 2 * (len(widths) - 1) <= room else 1
    # names that are too long are folded, numbers never
    widths[0] = max(NAME_WIDTH, min(widths[0], room - numbers - gap * (len(widths) - 1)))
    # the box draws one character of the gap between columns
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, show_footer=True, padding=(0, 0, 0, gap - 1), pad_edge=False
    )
    for place, (title, width) in enumerate(zip(titles, widths, strict=True)):
        table.add_column(
            title,
            last_row[place],
            justify="right" if place else "left",
            width=width,
            no_wrap=place > 0,
            overflow="fold",
        )
    for name, *numbers_of_layer in rows:
        table.add_row(_lines_of(name, widths[0]), *numbers_of_layer)
    return table


def _lines_of(name: str, width: int) -> str:
    """Break a name after dots, into lines of at most ``width`` characters where that is possible.

    >>> _lines_of("encoder.layer.10.attention", 14).splitlines()
    ['encoder.layer.', '10.attention']
    """
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def footer(settings: dict[str, Any], loss: float, samples: int, batches: int) -> list[Text]:
    """Describe the computation behind the numbers, and the titles."""
    draws = settings["monte_carlo_samples"]
    facts = [
        f"{settings['model']}: {settings['loss']} {number_text(loss)}",
        f"{counted(samples, 'sample')} in {counted(batches, 'batch')}",
        f"{settings['mode']} mode",
        f"{settings['precision']} on {settings['device']}",
    ]
    lines = [
        ", ".join(facts),
        "grad: of the mean loss; sample: norms of single gradients; SNR: |grad|^2 / trace of their covariance",
    ]
    if draws is not None:
        lines.append(
            f"GGN tr: exact, Monte Carlo ({counted(draws, 'draw')}); "
            "KFAC cond: largest/smallest eigenvalue, rank/size if singular"
        )
    return [Text(line) for line in lines]


def _cells(layer: Layer, name: str) -> list[str]:
    return [
        name,
        f"{layer.parameters:,}",
        number_text(layer.gradient_norm),
        number_text(layer.sample_gradient_norm_median),
        number_text(layer.sample_gradient_norm_95),
        number_text(layer.signal_to_noise),
        number_text(layer.ggn_trace_exact),
        number_text(layer.ggn_trace_monte_carlo),
        _condition(layer, "A"),
        _condition(layer, "B"),
    ]


def _condition(layer: Layer, side: str) -> str:
    """Return the condition of the layer's first factor of this side, with its rank if it is singular."""
    spectrum = layer.factor(side)
    if spectrum is None:
        return "-"
    if not spectrum.built:
        return f"{spectrum.size} wide"
    if spectrum.rank is None:
        return "nan"
    condition = number_text(spectrum.condition)
    if spectrum.rank == spectrum.size:
        return condition
    rank = f"{spectrum.rank}/{spectrum.size}"
    return f"{condition} {rank}" if len(condition + rank) <= 10 else f"{condition}\n{rank}"


def number_text(value: float | None) -> str:
    """Format a number to three digits or more, or to two and an exponent if it is very small or large."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 99999.5:
        return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def seconds_text(seconds: float) -> str:
    """Return a time to two digits.

    >>> [seconds_text(s) for s in (0.0, 4.2e-5, 0.00123, 0.0468, 0.812, 3.21, 75.0)]
    ['0.0 ms', '0.042 ms', '1.2 ms', '47 ms', '810 ms', '3.2 s', '75 s']
    """
    rounded = float(f"{seconds:.2g}")
    size, unit = (rounded, "s") if rounded >= 1 else (1000 * rounded, "ms")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:#.2g} {unit}"


def counted(number: int, noun: str) -> str:
    """Format a number of things, with the plural of their noun."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
