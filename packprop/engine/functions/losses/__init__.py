"""Descriptions of loss functions: square roots of their Hessians, Monte Carlo draws, numbers of terms."""

from packprop.engine.functions.losses import rules
from packprop.engine.functions.losses.description import (
    LOSSES,
    SYMMETRIC,
    Loss,
    Root,
    describe,
    input_of,
    register_loss,
)
from packprop.engine.functions.losses.roots import bernoulli_root, gaussian_root, matrix_root, softmax_root

__all__ = [
    "LOSSES",
    "SYMMETRIC",
    "Loss",
    "Root",
    "bernoulli_root",
    "describe",
    "gaussian_root",
    "input_of",
    "matrix_root",
    "register_loss",
    "rules",
    "softmax_root",
]
