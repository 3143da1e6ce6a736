"""Extensions of packprop under their names in BackPACK; they also take module extensions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from packprop import extensions
from packprop.compat.own import BackpropExtension, ModuleExtension, Unsupported
from packprop.types import Extension, Row, Seed


class Catalogued(BackpropExtension):
    """What extensions of packprop's catalogue get in addition: module extensions for some classes.

    Values of module extensions replace those of packprop. If the extension has columns, each method gets
    the columns of the root of the GGN at the module's output, ``[v, n, *y]``.
    """

    def get_subsampling(self) -> list[int] | None:
        """Indices of the samples to look at; ``None`` for all."""
        chosen = getattr(self, "subsampling", None)
        return None if chosen is None else list(chosen)

    def get_num_mc_samples(self) -> int:
        """Number of Monte Carlo draws."""
        count: int = getattr(self, "mc_samples")  # noqa: B009  # only extensions with draws have it
        return count

    def expects_backpropagation_quantities(self) -> bool:
        """Whether it needs more than inputs and the gradient."""
        return any(row.seed.kind not in ("none", "gradient") for row in self._rows)

    @property
    def _rows(self) -> Sequence[Row]:
        return self.rows if isinstance(self, Extension) else ()

    @property
    def seed(self) -> Seed:
        """The seed of its columns; if they are exact, one for each entry of the output, as in BackPACK.

        Raises:
            Unsupported: If it has no columns that module extensions could get.
        """
        for row in self._rows:
            if row.seed.kind == "ggn":
                return dataclasses.replace(row.seed, entrywise=row.seed.mc_samples is None)
        raise Unsupported(
            f"{type(self).__name__} was to run a module extension.",
            type(self).__name__,
            "what it propagates back are not columns of a root",
            "leave the module extension out: packprop differentiates the module by autograd",
        )

    def extension_for(self, module: nn.Module) -> ModuleExtension | None:
        """The module extension that runs on a module, if its class has one."""
        return self.module_extensions.get(type(module))


def is_available(name: str) -> bool:
    """Whether packprop has an extension of this name."""
    value = getattr(extensions, name, None)
    return isinstance(value, type) and issubclass(value, Extension) and value is not Extension


@functools.cache
def _with_module_extensions(name: str) -> type:
    original = getattr(extensions, name)
    return type(name, (original, Catalogued), {"__module__": __name__, "__doc__": original.__doc__})


def __getattr__(name: str) -> Any:
    if not is_available(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _with_module_extensions(name)
