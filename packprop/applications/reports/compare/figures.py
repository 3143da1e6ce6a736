"""The figure of a comparison: a quantity in both profiles, layer by layer."""

from __future__ import annotations

import altair as alt

from packprop.applications.reports.compare.differences import CLEAR, ComparisonValues
from packprop.applications.reports.compare.table import change_text, value_texts
from packprop.applications.reports.page.figure import (
    FIRST,
    MUTED,
    STEP,
    Figure,
    chart_of_layers,
    largest,
    log_axis,
    of_how_many,
    specification,
)


def dumbbells(compared: ComparisonValues, quantity: str) -> Figure | None:
    """Draw both values of each layer, with two standard errors; ``None`` if no layer has two above zero."""
    found = {name: layer[quantity] for name, layer in compared.layers.items()}
    sizes = {
        name: max(each.first, each.second)
        for name, each in found.items()
        if each.first is not None and each.second is not None and min(each.first, each.second) > 0
    }
    shown = largest([*found], sizes)
    if not shown:
        return None
    values = [value for name in shown for value in (found[name].first, found[name].second) if value is not None]
    low, high = min(values) / 2, max(sizes.values()) * 2
    rows = []
    for name in shown:
        each = found[name]
        for profile, value, error in (
            (compared.names[0], each.first, each.first_error),
            (compared.names[1], each.second, each.second_error),
        ):
            assert value is not None
            spread = CLEAR * (error or 0.0)
            ends = {"from": max(low, value - spread), "to": min(high, value + spread)}
            rows.append(
                {"layer": name, "profile": profile, "value": value, **ends, "change": change_text(each)}
            )
    scale, axis = log_axis(low, high)
    profiles = list(compared.names)
    base = chart_of_layers(rows).encode(
        yOffset=alt.YOffset("profile:N", sort=profiles),
        color=alt.Color("profile:N", scale=alt.Scale(domain=profiles, range=[MUTED, FIRST]), sort=profiles),
        tooltip=[
            alt.Tooltip("layer:N"),
            alt.Tooltip("profile:N"),
            alt.Tooltip("value:Q", format=".3g"),
            alt.Tooltip("change:N", title="difference"),
        ],
    )
    chart = alt.layer(
        base.mark_rule(strokeWidth=2, opacity=0.5).encode(
            x=alt.X("from:Q", scale=scale, axis=axis, title=f"{quantity} (logarithmic)"), x2="to:Q"
        ),
        base.mark_circle(size=70, opacity=1).encode(x="value:Q"),
    )
    clear = sum(found[name].is_clear for name in shown)
    return Figure(
        quantity.replace(" ", "-"),
        quantity.capitalize().replace("Ggn", "GGN"),
        "Each dot is a profile; its line shows two standard errors on both sides."
        f"{of_how_many(len(shown), len(sizes))}",
        f"{quantity} of {len(shown)} layers in {compared.names[0]} and {compared.names[1]}; "
        f"{clear} of them differ clearly.",
        specification(chart, STEP * len(shown)),
        ["layer", compared.names[0], compared.names[1], "difference"],
        [[name, *value_texts(found[name]), change_text(found[name])] for name in shown],
    )
