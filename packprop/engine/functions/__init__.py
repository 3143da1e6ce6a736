"""Rules for parameters that enter nodes of the autograd graph, and for the curvature of losses.

This module has the names that you need to register functions and losses of your own.
"""

from packprop.engine.functions.building import affine, rowwise, scaled, select_samples
from packprop.engine.functions.entry import Entry, Scratch
from packprop.engine.functions.losses import (
    Loss,
    Root,
    bernoulli_root,
    gaussian_root,
    register_loss,
    softmax_root,
)
from packprop.engine.functions.losses.description import describe
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.registry import register_use, rule_for, without_rules

__all__ = [
    "Entry",
    "Loss",
    "NodeCall",
    "Root",
    "Scratch",
    "affine",
    "bernoulli_root",
    "describe",
    "gaussian_root",
    "register_loss",
    "register_use",
    "rowwise",
    "rule_for",
    "scaled",
    "select_samples",
    "softmax_root",
    "without_rules",
]
