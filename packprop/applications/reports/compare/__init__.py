"""Two profiles of one model, side by side."""

from packprop.applications.reports.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
