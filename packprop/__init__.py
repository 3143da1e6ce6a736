"""packprop packs more than the gradient into one backward pass of PyTorch.

Seeds are swept back through the graph and become cotangents. A use says how its parameters meet these;
statistics turn that into numbers; an extension says how the numbers merge. A plan says how large chunks are.
"""

from packprop import distributed, extensions
from packprop.algebra import kronecker
from packprop.algebra.algorithms import algorithms
from packprop.compiled.step import CompiledStep, compile
from packprop.context import backpack
from packprop.curvature import operators, products
from packprop.dataset.compute import compute
from packprop.dataset.result import Result
from packprop.eager import eager_backward
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.functions.losses.description import register_loss
from packprop.functions.registry import register_use
from packprop.memory.plan import Plan
from packprop.memory.planning import plan
from packprop.monitor import Monitor
from packprop.recording.switch import disable, extend, record, restore
from packprop.reports.coverage import coverage
from packprop.reports.coverage_values import Coverage
from packprop.reports.profile.result import Profile
from packprop.reports.profile.run import profile
from packprop.store.reading import Store, StoredArray
from packprop.store.writing import StoreWriter

# Tutorials for BackPACK import from `custom_module`, `core` and `utils`: packages in compat/paths.
__path__.append(f"{__path__[0]}/compat/paths")

__all__ = [
    "BadInput",
    "CompiledStep",
    "Coverage",
    "Monitor",
    "PackpropError",
    "PackpropWarning",
    "Plan",
    "Profile",
    "Result",
    "Store",
    "StoreWriter",
    "StoredArray",
    "algorithms",
    "backpack",
    "compile",
    "compute",
    "coverage",
    "disable",
    "distributed",
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
