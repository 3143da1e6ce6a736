"""``compare``: two profiles of one model as one value, which prints, converts to JSON and draws a page."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult

from packprop.applications.reports.compare.differences import ComparisonValues, differences_of
from packprop.applications.reports.compare.page import comparison_page
from packprop.applications.reports.compare.table import comparison_table, notes
from packprop.applications.reports.profile.result import Profile
from packprop.errors import BadInput

ASKED = "Two profiles were to be compared."


@dataclass(frozen=True)
class Comparison(ComparisonValues):
    """Two profiles of one model side by side; prints as a table, converts to JSON, draws a page."""

    def to_html(self) -> str:
        """Return the page: one HTML file with figures, which needs no network.

        Raises:
            PackpropError: If the libraries that draw it are not installed.
        """
        return comparison_page(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield comparison_table(self)
        yield ""
        yield from notes(self)


def compare(first: Profile, second: Profile, first_name: str = "A", second_name: str = "B") -> Comparison:
    """Compare two profiles of one model, quantity by quantity, with the uncertainty of their differences.

    Args:
        first: The reference.
        second: The other profile; a difference is the second value less the first.
        first_name: The name of the first profile.
        second_name: The name of the second profile.

    Raises:
        BadInput: If an argument is no profile, or the layers or the losses of the two differ.
    """
    for name, profile in (("first", first), ("second", second)):
        if not isinstance(profile, Profile):
            instead = "give what packprop.profile(...) or Profile.load(...) returned"
            raise BadInput(ASKED, f"{name}, {type(profile).__name__}", "it is not a profile", instead)
    _require_same_model(first, second)
    known = first.settings.get("data")
    paired = known is not None and known == second.settings.get("data") and first.samples == second.samples
    both = {
        name: (first.settings.get(name), second.settings.get(name))
        for name in first.settings | second.settings
        if name not in ("data", "graphs")
    }
    return Comparison(
        names=(first_name, second_name),
        paired=paired,
        samples=(first.samples, second.samples),
        losses=(first.loss, second.loss),
        settings={name: (one, other) for name, (one, other) in both.items() if one != other},
        layers={
            one.name: differences_of(first, second, (one, other), paired)
            for one, other in zip(first.layers, second.layers, strict=True)
        },
        total=differences_of(first, second, (first.total, second.total), paired),
    )


def _require_same_model(first: Profile, second: Profile) -> None:
    """Refuse profiles with different layers, or losses.

    Raises:
        BadInput: If layers or losses differ; the error names the first difference.
    """
    instead = "compare profiles of one model, with one loss; parameters, data and settings may differ"
    losses = first.settings.get("loss"), second.settings.get("loss")
    if losses[0] != losses[1]:
        raise BadInput(ASKED, "their losses", f"{losses[0]} in the first, {losses[1]} in the second", instead)
    for one, other in zip(first.layers, second.layers, strict=False):
        own, others = (f"{layer.name}, {layer.kind} of {layer.parameters:,}" for layer in (one, other))
        if own != others:
            why = f"{own} parameters in the first; {others} in the second"
            raise BadInput(ASKED, f"layer {one.name!r}", why, instead)
    if len(first.layers) != len(second.layers):
        why = f"{len(first.layers)} in the first, {len(second.layers)} in the second"
        raise BadInput(ASKED, "the number of layers", why, instead)
