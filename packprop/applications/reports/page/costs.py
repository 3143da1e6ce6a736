"""The table of the cost of each quantity in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packprop.applications.reports.page.naming import folded_names
from packprop.applications.reports.profile.costs import Cost
from packprop.applications.reports.profile.layers import TOTAL
from packprop.applications.reports.profile.memory_use import MemoryUse


def seconds_text(seconds: float) -> str:
    """Return a time to two digits.

    >>> [seconds_text(s) for s in (0.0, 4.2e-5, 0.00123, 0.0468, 0.812, 3.21, 75.0)]
    ['0.0 ms', '0.042 ms', '1.2 ms', '47 ms', '810 ms', '3.2 s', '75 s']
    """
    rounded = float(f"{seconds:.2g}")
    size, unit = (rounded, "s") if rounded >= 1 else (1000 * rounded, "ms")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:#.2g} {unit}"


def costs_table(use: MemoryUse | None) -> dict[str, Any] | None:
    """Return titles of quantities, rows of layers, the total, the longest time; ``None`` without any costs."""
    if use is None or not use.costs:
        return None
    quantities = [*dict.fromkeys(cost.quantity for cost in use.costs)]
    cells = {(cost.layer, cost.quantity): cost for cost in use.costs}
    # in the order of the forward pass; the backward pass meets them in reverse
    layers = [*dict.fromkeys(cost.layer for cost in use.costs if cost.layer != TOTAL)][::-1]
    folded = folded_names(layers)

    def cells_of(layer: str) -> list[Cost | None]:
        return [cells.get((layer, quantity)) for quantity in quantities]

    return {
        "quantities": quantities,
        "rows": [(folded[layer], layer, cells_of(layer)) for layer in layers],
        "total": cells_of(TOTAL),
        "longest": max((cost.seconds for cost in use.costs if cost.layer != TOTAL), default=0.0),
    }


def longest_of(costs: Sequence[Cost]) -> tuple[Cost, float] | None:
    """Return the slowest layer and quantity, and their share of all; ``None`` if there are no times."""
    single = [cost for cost in costs if cost.layer != TOTAL]
    total = sum(cost.seconds for cost in costs if cost.layer == TOTAL)
    if not single or not total:
        return None
    longest = max(single, key=lambda cost: cost.seconds)
    return longest, longest.seconds / total
