"""The parts of rules for functions and losses of your own."""

from packprop.engine.functions import (
    Entry,
    Loss,
    NodeCall,
    Root,
    Scratch,
    affine,
    bernoulli_root,
    gaussian_root,
    register_loss,
    register_use,
    rowwise,
    scaled,
    select_samples,
    softmax_root,
)

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
