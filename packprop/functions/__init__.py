"""Torch functions and losses by name: how parameters enter them, and how they curve.

Here are the names that users need to register functions and losses of their own.
"""

from packprop.functions import rules
from packprop.functions.building import affine, scaled
from packprop.functions.entry import Call, Entry, Scratch
from packprop.functions.losses import Loss, Root, bernoulli_root, gaussian_root, register_loss, softmax_root
from packprop.functions.registry import register_use

__all__ = [
    "Call",
    "Entry",
    "Loss",
    "Root",
    "Scratch",
    "affine",
    "bernoulli_root",
    "gaussian_root",
    "register_loss",
    "register_use",
    "rules",
    "scaled",
    "softmax_root",
]
