"""Names of parameters and modules as the model itself has them, whatever wraps it or parts of it.

Names seed random matrices, appear in files and go between ranks. So they must not depend on whether a process
trains ``model``, ``DistributedDataParallel(model)`` or ``torch.compile(model)``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers of a module that they name ``module``; other modules may use this name for anything."""

WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names that ``torch.compile``, the older FSDP and wrappers for checkpoints give the module inside them."""


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """Return parameters by their names in the model itself, with or without duplicates."""
    name_of = _names_in(model)
    found = model.named_parameters(remove_duplicate=remove_duplicate)
    return [(name_of(name), parameter) for name, parameter in found]


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return buffers by their names in the model itself."""
    name_of = _names_in(model)
    return [(name_of(name), buffer) for name, buffer in model.named_buffers()]


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of the model itself by their names, without wrappers."""
    name_of = _names_in(model)
    return [(name_of(name), module) for name, module in model.named_modules() if _wrapped_by(module) is None]


def _wrapped_by(module: nn.Module) -> str | None:
    """Return a wrapper's name for the module inside it; ``None`` for a module that is no wrapper."""
    if isinstance(module, PARALLEL):
        return "module"
    return next((name for name, _ in module.named_children() if name in WRAPPED), None)


def _names_in(model: nn.Module) -> Callable[[str], str]:
    """Return the function from a name to the name in the model itself: it drops the parts that wrappers add."""
    inside = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if (name := _wrapped_by(module)) is not None
    }

    def name_of(name: str) -> str:
        parts = name.split(".")
        kept = [part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in inside]
        return ".".join(kept)

    return name_of if inside else str
