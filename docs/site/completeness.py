"""Sphinx extension: the reference has every public name, or the build warns.

A warning is an error under ``make docs``. Public is what stands in ``__all__`` of modules that have a section
in the reference. That each public module has one is tested without Sphinx, in ``tests/house/test_site.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _held(name: str) -> object:
    """The object of a dotted name; ``None`` if there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            module = import_module(".".join(parts[:end]))
            return functools.reduce(lambda held, part: getattr(held, part, None), parts[end:], module)
    return None


def missing(modules: Iterable[str], documented: Iterable[str]) -> list[str]:
    """Public names of the modules that are not documented, under this or another name: ``module.name``."""
    held = {id(_held(name)) for name in documented}
    return [
        f"{module}.{public}"
        for module in modules
        for public in getattr(import_module(module), "__all__", ())
        if not isinstance(value := getattr(import_module(module), public), ModuleType) and id(value) not in held
    ]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that is missing."""
    domain = env.domains["py"]
    documented = {name for name, *_ in domain.get_objects()}
    modules = {name for name, _, kind, *_ in domain.get_objects() if kind == "module"}
    for name in missing(sorted(modules), documented):
        logger.warning("the reference does not have %s", name, type="packprop", subtype="missing")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
