"""The figure of a comparison: a quantity in both profiles, layer by layer."""

from __future__ import annotations

import altair as alt

from packprop.applications.reports.compare.differences import CLEAR
from packprop.applications.reports.compare.table import change_text, value_texts
from packprop.applications.reports.compare.values import ComparisonValues
from packprop.applications.reports.page.figure import (
    FIRST,
    MUTED,
    STEP,
    Figure,
    data_of,
    largest,
    layer_axis,
    log_axis,
    of_how_many,
    specification,
)
from packprop.applications.reports.page.naming import short_labels


def dumbbells(compared: ComparisonValues, quantity: str) -> Figure | None:
    """Draw both values of each layer, with two standard errors; ``None`` if no layer has two positive ones."""
    found = {
        name: (layer[quantity], layer[quantity].first, layer[quantity].second)
        for name, layer in compared.layers.items()
    }
    sizes = {
        name: max(first, second)
        for name, (_, first, second) in found.items()
        if first is not None and second is not None and min(first, second) > 0
    }
    names = largest([*found], sizes)
    if not names:
        return None
    labels, rows = short_labels(names), []
    low = min(min(found[name][1] or 0.0, found[name][2] or 0.0) for name in names) / 2
    high = max(sizes.values()) * 2
    for name in names:
        difference = found[name][0]
        for profile, value, error in (
            (compared.names[0], difference.first, difference.first_error),
            (compared.names[1], difference.second, difference.second_error),
        ):
            assert value is not None
            spread = CLEAR * (error or 0.0)
            ends = {"from": max(low, value - spread), "to": min(high, value + spread)}
            row = {"label": labels[name], "layer": name, "profile": profile, "value": value, **ends}
            rows.append({**row, "change": change_text(difference)})
    scale, axis = log_axis(low, high)
    base = alt.Chart(data_of(rows)).encode(
        y=layer_axis([*labels.values()]),
        yOffset=alt.YOffset("profile:N", sort=list(compared.names)),
        color=alt.Color(
            "profile:N",
            scale=alt.Scale(domain=list(compared.names), range=[MUTED, FIRST]),
            sort=list(compared.names),
        ),
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
    ).properties(height=STEP * len(names))
    clear = sum(found[name][0].is_clear for name in names)
    return Figure(
        quantity.replace(" ", "-"),
        quantity.capitalize().replace("Ggn", "GGN"),
        "Each dot is a profile, its line two standard errors to both sides."
        f"{of_how_many(len(names), len(sizes))}",
        f"{quantity} of {len(names)} layers in {compared.names[0]} and {compared.names[1]}; "
        f"{clear} of them differ clearly.",
        specification(chart),
        ["layer", compared.names[0], compared.names[1], "difference"],
        [
            [
                name,
                *value_texts(found[name][0]),
                change_text(found[name][0]),
            ]
            for name in names
        ],
    )
