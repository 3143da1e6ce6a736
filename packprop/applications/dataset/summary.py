"""Values over a data set as a table: a line for each tensor, as text, as HTML, as a data frame."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from packprop.engine.algebra import Eigen
from packprop.engine.tensors import accumulation_dtype, own_part, plain_text, tensors_in
from packprop.store.frames import required_pandas

WIDTH = 100
"""The width of printed tables, in columns of a terminal."""

MOST_LINES = 40
"""The most lines that a notebook shows."""

LEFT = ("quantity", "parameter", "part")
"""Columns that name the tensor of a line."""


class Line(NamedTuple):
    """The facts about one tensor.

    Args:
        quantity: Attribute of the extension.
        parameter: Name of the parameter.
        part: ``"B"`` or ``"A"`` of Kronecker factors, ``"eigenvalues"``, or ``""``.
        shape: Its shape.
        dtype: Its precision, as ``"float32"``.
        norm: Square root of the sum of squares.
        mean: Mean of the entries, or of the magnitudes of complex ones; ``NaN`` without entries.
        smallest: The smallest entry.
        largest: The largest entry.
    """

    quantity: str
    parameter: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    mean: float
    smallest: float
    largest: float


COLUMNS = Line._fields


def lines_of(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Yield a line for each tensor in tables ``quantity -> parameter -> value``."""
    for quantity, by_name in tables.items():
        for parameter, value in by_name.items():
            for part, tensor in _parts(value):
                yield _line(quantity, parameter, part, tensor)


def as_text(tables: Mapping[str, Mapping[str, Any]], facts: str) -> str:
    """Return a table for a terminal, and facts below it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [name for name in COLUMNS if name != "dtype"]
    for name in shown:
        named = name in LEFT
        table.add_column(name, justify="left" if named else "right", overflow="fold", no_wrap=not named)
    for line in lines_of(tables):
        table.add_row(*_cells(line, shown))
    return "\n".join([plain_text(table, width=WIDTH, markup=False), "", facts])


def as_html(tables: Mapping[str, Mapping[str, Any]], facts: str) -> str:
    """Return the table for a notebook: its first lines, and the number of the others."""
    lines = list(lines_of(tables))
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(_html_row(_cells(line, COLUMNS)) for line in lines[:MOST_LINES])
    left = len(lines) - MOST_LINES
    more = f"<p>{left} more lines: see <code>summary()</code></p>" if left > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"{table}{more}<p>{html.escape(facts)}</p>"


def as_frame(asked: str, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a data frame of pandas, by quantity, parameter and part.

    Raises:
        BadInput: If pandas is missing.
    """
    pandas = required_pandas(asked)
    return pandas.DataFrame(lines_of(tables), columns=list(COLUMNS)).set_index(list(LEFT))


def _parts(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a value to describe, by their names."""
    if isinstance(value, Tensor):
        return [("", value)]
    if isinstance(value, Eigen):
        return [("eigenvalues", value.values)]
    tensors = list(tensors_in(value))
    if isinstance(value, (list, tuple)) and len(tensors) == len(value) <= 2:
        return list(zip("BA", tensors, strict=False))
    return [(str(place), tensor) for place, tensor in enumerate(tensors)]


def _line(quantity: str, parameter: str, part: str, tensor: Tensor) -> Line:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    tensor = own_part(tensor)
    if not tensor.numel():
        return Line(quantity, parameter, part, shape, dtype, 0.0, math.nan, math.nan, math.nan)
    real = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    wide = real.to(accumulation_dtype(real.dtype) if real.is_floating_point() else torch.float64)
    least, most = (float(each) for each in wide.aminmax())
    norm = float(torch.linalg.vector_norm(wide))
    return Line(quantity, parameter, part, shape, dtype, norm, float(wide.mean()), least, most)


def _cells(line: Line, columns: Sequence[str]) -> list[str]:
    values = [getattr(line, name) for name in columns]
    values = [list(value) if isinstance(value, tuple) else value for value in values]
    return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]


def _html_row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
