"""A comparison as a table for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from packprop.applications.reports.compare.differences import QUANTITIES, ComparisonValues, Difference
from packprop.applications.reports.profile.table import NAME_WIDTH, number_text
from packprop.applications.reports.profile.uncertainty import rounded_text


def comparison_table(compared: ComparisonValues) -> Table:
    """Return two lines for each layer: both values, and how they differ."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_footer=True, pad_edge=False)
    table.add_column("layer", "total", min_width=NAME_WIDTH, overflow="fold")
    for quantity in QUANTITIES:
        table.add_column(quantity, _cell(compared.total[quantity]), justify="right", no_wrap=True)
    for name, differences in compared.layers.items():
        table.add_row(name, *(_cell(differences[quantity]) for quantity in QUANTITIES))
    return table


def notes(compared: ComparisonValues) -> list[Text]:
    """Say what was compared, and what the marks stand for."""
    names = compared.names
    both = zip(names, compared.samples, compared.losses, strict=True)
    lines = [
        "; ".join(f"{name}: {count:,} samples, loss {number_text(loss)}" for name, count, loss in both),
        f"{names[0]} -> {names[1]}, below it the difference +- its standard error; *: above twice the error",
        "the same samples, compared one by one"
        if compared.paired
        else "different samples: the errors of both profiles are combined",
    ]
    lines += [f"{name}: {first} -> {second}" for name, (first, second) in compared.settings.items()]
    return [Text(line) for line in lines]


def change_text(difference: Difference) -> str:
    """Return a difference with its error, and a star if it is clear; an empty text if it is not known."""
    if difference.change is None:
        return ""
    known = difference.error
    error = "" if known is None else f" +- {rounded_text(known, known)}"
    sign = "+" if difference.change > 0 else ""
    return f"{sign}{rounded_text(difference.change, known)}{error}{'*' if difference.is_clear else ''}"


def _cell(difference: Difference) -> Text:
    values = " -> ".join(value_texts(difference))
    cell = Text(values if difference.first is not None or difference.second is not None else "-")
    change = change_text(difference)
    if change:
        cell.append(f"\n{change}", style="bold" if difference.is_clear else "dim")
    return cell


def value_texts(difference: Difference) -> tuple[str, str]:
    """Return both values, with the digits that their error or the difference's error supports."""

    def text(value: float | None, error: float | None) -> str:
        known = [each for each in (error, difference.error) if each is not None]
        return number_text(None) if value is None else rounded_text(value, min(known, default=None))

    return text(difference.first, difference.first_error), text(difference.second, difference.second_error)
