"""packprop packs more than the gradient into one backward pass of PyTorch.

Seeds are swept back to signals; a use says how a parameter meets a signal; statistics turn that into numbers;
an extension says how numbers merge; the plan says how big the bites are.
"""

from packprop import extensions, kronecker, operators, products
from packprop.algorithms import algorithms
from packprop.context import backpack
from packprop.coverage import Coverage, coverage
from packprop.dataset import Result, compute
from packprop.eager import eager_backward
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.losses import register_loss
from packprop.plan import Plan, plan
from packprop.profile import Profile, profile
from packprop.tape import disable, extend, record, restore
from packprop.uses import register_use

__all__ = [
    "BadInput",
    "Coverage",
    "PackpropError",
    "PackpropWarning",
    "Plan",
    "Profile",
    "Result",
    "algorithms",
    "backpack",
    "compute",
    "coverage",
    "disable",
    "eager_backward",
    "extend",
    "extensions",
    "kronecker",
    "operators",
    "plan",
    "products",
    "profile",
    "record",
    "register_loss",
    "register_use",
    "restore",
]
