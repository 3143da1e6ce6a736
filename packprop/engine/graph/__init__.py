"""The autograd graph between a loss and the parameters: its uses, and sweeps through it."""

from packprop.engine.graph.completeness import require_loss_inputs, require_unsharded
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.hooks import hooks_below
from packprop.engine.graph.site import Site
from packprop.engine.graph.sweep import SweepOptions, sweep
from packprop.engine.graph.walk import walk

__all__ = [
    "Graph",
    "ReachedUse",
    "Site",
    "SweepOptions",
    "hooks_below",
    "require_loss_inputs",
    "require_unsharded",
    "sweep",
    "walk",
]
