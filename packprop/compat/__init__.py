"""Support for code written for BackPACK: after ``install()``, ``import backpack`` finds packprop.

packprop offers every documented name of BackPACK, under every module path that leads to it. docs/compat.md
lists the names, and the numbers that differ because the older library's are wrong. ``averaged`` holds two
extensions of packprop that few need.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from packprop.compat import catalogue
from packprop.compat.calls import keep_calls
from packprop.compat.names import TABLE
from packprop.errors import PackpropError, PackpropWarning

__all__ = ["install", "is_installed", "uninstall"]

ROOT = "backpack"


class Missing(PackpropError, ModuleNotFoundError):
    """Raised for a module or name of BackPACK that has no counterpart here; an ``ImportError``."""


class _Finder(MetaPathFinder, Loader):
    """Makes the modules that ``TABLE`` names, and refuses all others below ``backpack``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname not in TABLE:
            if _is_only_looked_for():
                return None
            raise Missing(
                f"import {fullname} was asked for, and resolves to packprop.",
                fullname,
                "it is a private part of BackPACK: packprop has rules for functions, not for layers",
                "use an extension, a rule of your own (packprop.register_use) or a module extension; "
                "docs/compat.md lists the modules that are there",
            )
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in TABLE))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"The documented names of BackPACK's {name}, made of packprop."

        def look_up(wanted: str) -> Any:
            value = _resolve(name, wanted)
            module.__dict__[wanted] = value
            return value

        for known, entry in TABLE[name].items():
            if entry is not catalogue or catalogue.is_available(known):
                look_up(known)
        module.__dict__["__all__"] = [known for known in TABLE[name] if not known.startswith("_")]
        module.__dict__["__getattr__"] = look_up


def _resolve(module: str, name: str) -> Any:
    """Return the object that a name of a module stands for.

    Raises:
        Missing: If BackPACK documents the name, but packprop does not have it.
        AttributeError: If there is no such name.
    """
    if f"{module}.{name}" in TABLE:
        return importlib.import_module(f"{module}.{name}")
    found = TABLE[module].get(name)
    if found is None and module == f"{ROOT}.extensions" and catalogue.is_available(name):
        found = catalogue  # for an extension that only packprop has
    if found is None:
        raise AttributeError(f"module {module!r} (packprop.compat) has no attribute {name!r}")
    if found is catalogue and not catalogue.is_available(name):
        raise Missing(
            f"{name} of {module} was asked for, and resolves to packprop.",
            f"packprop.extensions.{name}",
            "this version of packprop does not have it",
            "choose from " + ", ".join(sorted(filter(catalogue.is_available, TABLE[f"{ROOT}.extensions"]))),
        )
    return getattr(found, name) if isinstance(found, ModuleType) else found


def _is_only_looked_for() -> bool:
    """Tell whether ``importlib.util.find_spec`` asks: it gets ``None`` where ``import`` raises ``Missing``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "importlib._bootstrap"):
        frame = frame.f_back
    return frame is not None and frame.f_code is importlib.util.find_spec.__code__


_finder = _Finder()
_shadowed: dict[str, ModuleType] = {}


def install(replace: bool = False, keep_module_io: bool = False) -> bool:
    """Make ``import backpack`` resolve to packprop in this process.

    If BackPACK is installed, packprop warns and leaves it in place, unless you replace it.

    Args:
        replace: Put packprop in the place of an installed BackPACK, even if it was imported already; names that
            a program has already imported from BackPACK keep their meaning.
        keep_module_io: Make extended modules keep ``input0``, ``output`` from now on; by default they do so
            once an extension for single modules has been defined.

    Returns:
        True if ``import backpack`` finds packprop now.
    """
    if keep_module_io:
        keep_calls()
    if is_installed():
        return True
    there = ROOT in sys.modules or importlib.util.find_spec(ROOT) is not None
    if there and not replace:
        warnings.warn(
            "BackPACK is installed, so `import backpack` still imports it; to put packprop in its place, call "
            "packprop.compat.install(replace=True).",
            PackpropWarning,
            stacklevel=2,
        )
        return False
    _shadowed.update({name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours_by_name(name)})
    sys.meta_path.insert(0, _finder)
    return True


def uninstall() -> None:
    """Undo ``install``: ``import backpack`` finds an installed BackPACK again, as it was."""
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if _is_ours_by_name(name)]:
        del sys.modules[name]
    sys.modules.update(_shadowed)
    _shadowed.clear()


def is_installed() -> bool:
    """Tell whether ``import backpack`` finds packprop."""
    return _finder in sys.meta_path


def _is_ours_by_name(name: str) -> bool:
    return name.partition(".")[0] == ROOT
