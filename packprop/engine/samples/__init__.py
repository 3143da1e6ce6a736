"""The place of the samples of a pass, and checks that they stay apart."""

from packprop.engine.samples.locating import check_graph
from packprop.engine.samples.separation import Place, places_at

__all__ = [
    "Place",
    "check_graph",
    "places_at",
]
