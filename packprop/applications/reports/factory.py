"""The user's factory, which returns a model, a loss and data, and the device that a command line names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from packprop.applications.dataset.messages import described, explanation
from packprop.errors import BadInput

ASKED = "packprop profile was called."


def load_factory(name: str, asked: str = ASKED, argument: str = "FACTORY") -> Callable[..., Any]:
    """Import the function that ``package.module:function`` names; errors name the ``argument`` it came in.

    Raises:
        BadInput: If the name has another form, the import fails, or the name leads to no function.
    """
    module_name, colon, path = name.partition(":")
    where = f"{argument}, {name!r}"
    if not (module_name and colon and path) or module_name.endswith(".py") or "/" in module_name:
        stem = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise BadInput(
            asked,
            where,
            "it does not have the form package.module:function",
            f"name a module as in an import, and a function: {stem or 'train'}:{path or 'factory'}",
        )
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    named: Any
    try:
        named = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            why = f"no module {missing!r} is in {os.getcwd()} or among the installed packages"
            instead = "run the command from the folder that holds it, or set PYTHONPATH"
        else:
            why = f"importing {module_name} failed: {explanation(error)}"
            instead = f"check that python -c 'import {module_name}' works"
        raise BadInput(asked, where, why, instead) from error
    for part in path.split("."):
        if not hasattr(named, part):
            known = getattr(named, "__dict__", {}).items()
            functions = {key: value for key, value in known if callable(value)}
            own = [key for key, value in functions.items() if getattr(value, "__module__", "") == module_name]
            own = [*own[:5], "..."] if len(own) > 5 else own
            raise BadInput(
                asked,
                where,
                f"{module_name} has no {path!r}",
                f"name one of its functions: {', '.join(own) if own else 'it has none'}",
            )
        named = getattr(named, part)
    if not callable(named):
        raise BadInput(
            asked,
            where,
            f"{path!r} is {described(named)}, which cannot be called",
            "name a function that returns (model, loss, data)",
        )
    factory: Callable[[], Any] = named
    return factory


def call_factory(factory: Callable[[], Any], name: str, asked: str = ASKED) -> tuple[Any, Any, Any]:
    """Return the model, the loss and the data of the factory.

    Raises:
        BadInput: If the factory fails, or returns anything but three things.
    """
    where = f"FACTORY, {name!r}"
    instead = "return model, loss, data: a module, a loss function, and a data set or batches"
    try:
        returned = factory()
    except (Exception, SystemExit) as error:
        raise BadInput(
            asked, where, f"it raised {explanation(error)}", "make sure that it runs without arguments"
        ) from error
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        what = f"{len(returned)} things" if isinstance(returned, (tuple, list)) else described(returned)
        raise BadInput(asked, where, f"it returned {what}, not three things", instead)
    model, loss, data = returned
    return model, loss, data


def device_named(asked: str, name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        BadInput: If torch cannot use a device of this name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            asked, f"--device {name}", reason, "name a device that this torch can use, such as cpu"
        ) from error
    return device


def moved(device: torch.device | None, *parts: Any) -> list[Any]:
    """Move modules to ``device``, if it is given; return everything else as it is."""
    return [part.to(device) if device is not None and isinstance(part, nn.Module) else part for part in parts]
