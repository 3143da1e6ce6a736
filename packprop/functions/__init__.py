"""Rules for parameters that enter nodes of the autograd graph, and for the curvature of losses.

This module has the names that you need to register functions and losses of your own.
"""

from packprop.functions.building import affine, rowwise, scaled, select_samples
from packprop.functions.entry import Entry, Scratch
from packprop.functions.losses import Loss, Root, bernoulli_root, gaussian_root, register_loss, softmax_root
from packprop.functions.node_calls import NodeCall
from packprop.functions.registry import register_use

__all__ = [
    "Entry",
    "Loss",
    "NodeCall",
    "Root",
    "Scratch",
    "affine",
    "bernoulli_root",
    "gaussian_root",
    "register_loss",
    "register_use",
    "rowwise",
    "scaled",
    "select_samples",
    "softmax_root",
]
