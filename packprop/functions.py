"""The parts of rules for functions and losses of your own."""

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
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.registry import register_use

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
