"""The page of a comparison."""

from __future__ import annotations

from packprop.applications.reports.compare.differences import QUANTITIES, ComparisonValues, Difference
from packprop.applications.reports.compare.table import change_text, value_texts
from packprop.applications.reports.page.findings import Finding
from packprop.applications.reports.page.libraries import require_libraries
from packprop.applications.reports.page.templating import template
from packprop.applications.reports.profile.table import counted, number_text


def comparison_page(compared: ComparisonValues) -> str:
    """Return the page, as text.

    Raises:
        PackpropError: If the libraries that draw it are not installed.
    """
    require_libraries()
    from packprop.applications.reports.compare.figures import dumbbells

    drawn = (dumbbells(compared, quantity) for quantity in QUANTITIES)
    return template("compare.html").render(
        compared=compared,
        findings=findings_of(compared),
        shown=[],
        figures=[figure for figure in drawn if figure is not None],
        quantities=QUANTITIES,
        both=both,
        change_text=change_text,
    )


def both(difference: Difference) -> str:
    """Return both values of a quantity."""
    return " → ".join(value_texts(difference))


def findings_of(compared: ComparisonValues) -> list[Finding]:
    """Return one sentence for each quantity: where it differs, and how clearly."""
    found = []
    for quantity in sorted(QUANTITIES, key=lambda quantity: not compared.total[quantity].is_clear):
        total = compared.total[quantity]
        if total.change is None:
            continue
        clear = [name for name, layer in compared.layers.items() if layer[quantity].is_clear]
        times = total.second / total.first if total.first and total.second is not None else None
        if not total.is_clear:
            says = f"{quantity.capitalize()}: no clear difference in total."
        elif times is None:
            says = f"{quantity.capitalize()}: {both(total)}."
        else:
            says = f"{quantity.capitalize()}: {number_text(times)} times as large."
        where = f"It differs clearly in {len(clear)} of {counted(len(compared.layers), 'layer')}"
        most = f", {', '.join(clear[:3])}{' and others' if len(clear) > 3 else ''}" if clear else ""
        error = "" if total.error is None else f" Total: {change_text(total).rstrip('*').replace('+-', '±')}."
        found.append(Finding(says.replace("Ggn", "GGN"), f"{where}{most}.{error}"))
    return found
