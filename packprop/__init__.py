"""packprop packs more than the gradient into one backward pass of PyTorch.

Seeds are swept back through the graph and become cotangents. A use says how its parameters meet these;
statistics turn that into numbers; an extension says how the numbers merge. A plan says how large chunks are.
"""

from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What type checkers and editors read; at run time a name is imported when it is first asked for.
    from packprop import (
        compat,
        distributed,
        errors,
        examples,
        extensions,
        monitor,
        store,
        testing,
        types,
    )
    from packprop.algebra import kronecker
    from packprop.algebra.algorithms import algorithms
    from packprop.clipped import ClippedGradients, clipped_gradients
    from packprop.compiled.step import CompiledStep, compile
    from packprop.context import backpack
    from packprop.curvature import products
    from packprop.dataset import operators
    from packprop.dataset.compute import compute
    from packprop.dataset.result import Result
    from packprop.eager import eager_backward
    from packprop.errors import BadInput, PackpropError, PackpropWarning
    from packprop.functions.losses.description import register_loss
    from packprop.functions.registry import register_use
    from packprop.memory.plan import Plan
    from packprop.memory.planning import plan
    from packprop.monitor import Monitor
    from packprop.queries.influence import influence
    from packprop.queries.optimizers import optimizer_curvature
    from packprop.queries.refining import Refinement
    from packprop.queries.result import Influence
    from packprop.queries.self_influence import self_influence
    from packprop.recording.switch import disable, extend, record, restore
    from packprop.reports.compare.comparison import Comparison, compare
    from packprop.reports.coverage import coverage
    from packprop.reports.coverage_values import Coverage
    from packprop.reports.profile.result import Profile
    from packprop.reports.profile.run import profile
    from packprop.store.reading import Store, StoredArray
    from packprop.store.writing import StoreWriter

# Tutorials for BackPACK import from `custom_module`, `core` and `utils`: packages in compat/paths.
__path__.append(f"{__path__[0]}/compat/paths")

# What is imported when it is first asked for, so that `import packprop` costs nothing beside torch:
# name -> module that holds it. The test of this file compares it with the imports above.
_HOMES = {
    "BadInput": "packprop.errors",
    "ClippedGradients": "packprop.clipped",
    "Comparison": "packprop.reports.compare.comparison",
    "CompiledStep": "packprop.compiled.step",
    "Coverage": "packprop.reports.coverage_values",
    "Influence": "packprop.queries.result",
    "Monitor": "packprop.monitor",
    "PackpropError": "packprop.errors",
    "PackpropWarning": "packprop.errors",
    "Plan": "packprop.memory.plan",
    "Profile": "packprop.reports.profile.result",
    "Refinement": "packprop.queries.refining",
    "Result": "packprop.dataset.result",
    "Store": "packprop.store.reading",
    "StoreWriter": "packprop.store.writing",
    "StoredArray": "packprop.store.reading",
    "algorithms": "packprop.algebra.algorithms",
    "backpack": "packprop.context",
    "clipped_gradients": "packprop.clipped",
    "compare": "packprop.reports.compare.comparison",
    "compile": "packprop.compiled.step",
    "compute": "packprop.dataset.compute",
    "coverage": "packprop.reports.coverage",
    "disable": "packprop.recording.switch",
    "eager_backward": "packprop.eager",
    "extend": "packprop.recording.switch",
    "influence": "packprop.queries.influence",
    "optimizer_curvature": "packprop.queries.optimizers",
    "plan": "packprop.memory.planning",
    "profile": "packprop.reports.profile.run",
    "record": "packprop.recording.switch",
    "register_loss": "packprop.functions.losses.description",
    "register_use": "packprop.functions.registry",
    "restore": "packprop.recording.switch",
    "self_influence": "packprop.queries.self_influence",
}
# Modules that are asked for as attributes: name -> where they are.
_MODULES = {
    "compat": "packprop.compat",
    "distributed": "packprop.distributed",
    "errors": "packprop.errors",
    "examples": "packprop.examples",
    "extensions": "packprop.extensions",
    "kronecker": "packprop.algebra.kronecker",
    "monitor": "packprop.monitor",
    "operators": "packprop.dataset.operators",
    "products": "packprop.curvature.products",
    "store": "packprop.store",
    "testing": "packprop.testing",
    "types": "packprop.types",
}

__all__ = [
    "BadInput",
    "ClippedGradients",
    "Comparison",
    "CompiledStep",
    "Coverage",
    "Influence",
    "Monitor",
    "PackpropError",
    "PackpropWarning",
    "Plan",
    "Profile",
    "Refinement",
    "Result",
    "Store",
    "StoreWriter",
    "StoredArray",
    "algorithms",
    "backpack",
    "clipped_gradients",
    "compare",
    "compat",
    "compile",
    "compute",
    "coverage",
    "disable",
    "distributed",
    "eager_backward",
    "errors",
    "examples",
    "extend",
    "extensions",
    "influence",
    "kronecker",
    "monitor",
    "operators",
    "optimizer_curvature",
    "plan",
    "products",
    "profile",
    "record",
    "register_loss",
    "register_use",
    "restore",
    "self_influence",
    "store",
    "testing",
    "types",
]

# Two threads that import modules which need each other would see halves of them. Names of `_MODULES` are
# imported without it: packprop's own files ask for these while the locks of their modules are held.
_ONE_AT_A_TIME = RLock()

__version__: str
"""The version that is installed, read from its metadata when you first ask for it."""

# Type checkers would take this for a module that has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, imported now; kept, so that this happens once."""
        import gc
        from importlib import import_module

        if name == "__version__":
            from importlib import metadata

            try:
                found = metadata.version("packprop")
            except metadata.PackageNotFoundError:
                found = "unknown"
        elif name in _MODULES:
            found = import_module(_MODULES[name])
        elif name in _HOMES:
            with _ONE_AT_A_TIME:
                # A collection in between looks at all objects of torch and finds nothing: a third of the time.
                collects = gc.isenabled()
                gc.disable()
                try:
                    found = getattr(import_module(_HOMES[name]), name)
                finally:
                    if collects:
                        gc.enable()
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
