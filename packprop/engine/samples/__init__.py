"""The place of the samples of a pass, and checks that they stay apart."""

from packprop.engine.samples.locating import check_graph

__all__ = [
    "check_graph",
]
