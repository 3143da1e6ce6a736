"""packprop packs more than the gradient into one backward pass of PyTorch.

packprop sends vectors back through autograd's graph, in your own backward pass and in further ones. At each
function with parameters, it computes numbers from the vectors that arrive and from the function's inputs.
An extension defines which numbers, and how they add up over samples. A plan sets how many samples packprop
takes at once. ``docs/concepts.md`` explains the words seed, sweep, cotangent, use and structure.
"""

from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What type checkers and editors read; at run time a name is imported when it is first asked for.
    from packprop import compat as compat
    from packprop import errors as errors
    from packprop import examples as examples
    from packprop import extensions as extensions
    from packprop import functions as functions
    from packprop import monitor as monitor
    from packprop import store as store
    from packprop import testing as testing
    from packprop import types as types
    from packprop.applications.compiled.step import CompiledStep as CompiledStep
    from packprop.applications.compiled.step import compile as compile
    from packprop.applications.dataset import operators as operators
    from packprop.applications.dataset.compute import compute as compute
    from packprop.applications.dataset.result import Result as Result
    from packprop.applications.queries.checkpoints import Checkpoint as Checkpoint
    from packprop.applications.queries.checkpoints import tracin as tracin
    from packprop.applications.queries.influence import influence as influence
    from packprop.applications.queries.optimizers import optimizer_curvature as optimizer_curvature
    from packprop.applications.queries.refining import Refinement as Refinement
    from packprop.applications.queries.result import Influence as Influence
    from packprop.applications.queries.self_influence import self_influence as self_influence
    from packprop.applications.queries.token_influence import token_influence as token_influence
    from packprop.applications.reports.compare.comparison import Comparison as Comparison
    from packprop.applications.reports.compare.comparison import compare as compare
    from packprop.applications.reports.coverage import coverage as coverage
    from packprop.applications.reports.coverage_values import Coverage as Coverage
    from packprop.applications.reports.profile.result import Profile as Profile
    from packprop.applications.reports.profile.run import profile as profile
    from packprop.compat.paths import distributed as distributed
    from packprop.compat.paths import memory as memory
    from packprop.engine.algebra import kronecker as kronecker
    from packprop.engine.algebra.choices import algorithms as algorithms
    from packprop.engine.clipped import ClippedGradients as ClippedGradients
    from packprop.engine.clipped import clipped_gradients as clipped_gradients
    from packprop.engine.context import backpack as backpack
    from packprop.engine.curvature import products as products
    from packprop.engine.distributed.statement import AllRanks as AllRanks
    from packprop.engine.eager import eager_backward as eager_backward
    from packprop.engine.functions.losses.description import register_loss as register_loss
    from packprop.engine.functions.registry import register_use as register_use
    from packprop.engine.memory.bytes import byte_text as byte_text
    from packprop.engine.memory.live import LiveBytes as LiveBytes
    from packprop.engine.memory.plan import Plan as Plan
    from packprop.engine.memory.planning import plan as plan
    from packprop.engine.recording.switch import disable as disable
    from packprop.engine.recording.switch import extend as extend
    from packprop.engine.recording.switch import record as record
    from packprop.engine.recording.switch import restore as restore
    from packprop.errors import BadInput as BadInput
    from packprop.errors import PackpropError as PackpropError
    from packprop.errors import PackpropWarning as PackpropWarning
    from packprop.monitor import Monitor as Monitor
    from packprop.store.reading import Store as Store
    from packprop.store.reading import StoredArray as StoredArray
    from packprop.store.writing import StoreWriter as StoreWriter

# Older programs import from `distributed` and `memory`, tutorials for BackPACK from `custom_module`, `core` and
# `utils`: these stand in compat/paths.
__path__.append(f"{__path__[0]}/compat/paths")

# What is imported when it is first asked for, so that `import packprop` costs nothing beside torch:
# name -> module that holds it. The test of this file compares it with the imports above.
_HOMES = {
    "AllRanks": "packprop.engine.distributed.statement",
    "BadInput": "packprop.errors",
    "Checkpoint": "packprop.applications.queries.checkpoints",
    "ClippedGradients": "packprop.engine.clipped",
    "Comparison": "packprop.applications.reports.compare.comparison",
    "CompiledStep": "packprop.applications.compiled.step",
    "Coverage": "packprop.applications.reports.coverage_values",
    "Influence": "packprop.applications.queries.result",
    "LiveBytes": "packprop.engine.memory.live",
    "Monitor": "packprop.monitor",
    "PackpropError": "packprop.errors",
    "PackpropWarning": "packprop.errors",
    "Plan": "packprop.engine.memory.plan",
    "Profile": "packprop.applications.reports.profile.result",
    "Refinement": "packprop.applications.queries.refining",
    "Result": "packprop.applications.dataset.result",
    "Store": "packprop.store.reading",
    "StoreWriter": "packprop.store.writing",
    "StoredArray": "packprop.store.reading",
    "algorithms": "packprop.engine.algebra.choices",
    "backpack": "packprop.engine.context",
    "byte_text": "packprop.engine.memory.bytes",
    "clipped_gradients": "packprop.engine.clipped",
    "compare": "packprop.applications.reports.compare.comparison",
    "compile": "packprop.applications.compiled.step",
    "compute": "packprop.applications.dataset.compute",
    "coverage": "packprop.applications.reports.coverage",
    "disable": "packprop.engine.recording.switch",
    "eager_backward": "packprop.engine.eager",
    "extend": "packprop.engine.recording.switch",
    "influence": "packprop.applications.queries.influence",
    "optimizer_curvature": "packprop.applications.queries.optimizers",
    "plan": "packprop.engine.memory.planning",
    "profile": "packprop.applications.reports.profile.run",
    "record": "packprop.engine.recording.switch",
    "register_loss": "packprop.engine.functions.losses.description",
    "register_use": "packprop.engine.functions.registry",
    "restore": "packprop.engine.recording.switch",
    "self_influence": "packprop.applications.queries.self_influence",
    "token_influence": "packprop.applications.queries.token_influence",
    "tracin": "packprop.applications.queries.checkpoints",
}
# Modules that attributes load: name -> path.
_MODULES = {
    "compat": "packprop.compat",
    "distributed": "packprop.distributed",
    "errors": "packprop.errors",
    "examples": "packprop.examples",
    "extensions": "packprop.extensions",
    "functions": "packprop.functions",
    "kronecker": "packprop.engine.algebra.kronecker",
    "memory": "packprop.memory",
    "monitor": "packprop.monitor",
    "operators": "packprop.applications.dataset.operators",
    "products": "packprop.engine.curvature.products",
    "store": "packprop.store",
    "testing": "packprop.testing",
    "types": "packprop.types",
}

__all__ = sorted({*_HOMES, *_MODULES})

# Two threads that import modules which need each other would see halves of them. Names of `_MODULES` are
# imported without it: packprop's own files ask for these while the locks of their modules are held.
_ONE_AT_A_TIME = RLock()

__version__: str
"""The version that is installed, read from its metadata when you first ask for it."""

# Type checkers would take this for a module that has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name, and keep it, so that this happens once."""
        import gc
        import random
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
                # And rich draws a number when it is imported, from the generator that belongs to the user.
                collects, drawn = gc.isenabled(), random.getstate()
                gc.disable()
                try:
                    found = getattr(import_module(_HOMES[name]), name)
                finally:
                    random.setstate(drawn)
                    if collects:
                        gc.enable()
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
