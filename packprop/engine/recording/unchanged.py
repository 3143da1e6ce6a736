"""Passes that leave a model as it was."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from packprop.engine.recording.switch import extend, extended
from packprop.engine.tensors.random import python_random_unchanged, random_states, set_random_states
from packprop.engine.tensors.sharding import is_distributed
from packprop.engine.tensors.state import version
from packprop.errors import BadInput

TABLES = (dict, OrderedDict, set, list)
"""Classes of attributes whose entries are restored, such as the tables of a module's buffers and submodules."""


@contextlib.contextmanager
def unchanged(model: nn.Module, asked: str) -> Iterator[None]:
    """Extend a model inside the context; afterwards restore its tensors, its attributes and the random state.

    Raises:
        BadInput: If ``model`` is no module; with the request ``asked``, if it has uninitialised tensors.
    """
    if not isinstance(model, nn.Module):
        extend(model)  # raises
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise BadInput(
                asked,
                f"parameter {name!r}",
                "it is not initialised, and the pass would initialise it",
                "run one forward pass first",
            )
    modules = list(model.modules())
    held = [
        (table, table.copy()) for module in modules for table in vars(module).values() if type(table) in TABLES
    ]
    before = [
        (module, dict(vars(module)), dict(module.named_buffers(recurse=False, remove_duplicate=False)))
        for module in modules
    ]
    written = [(parameter, parameter.detach().clone()) for parameter in _written_parameters(modules)]
    state = random_states()
    copies: dict[int, Tensor] = {}
    for module, _, buffers in before:
        for name, buffer in buffers.items():
            setattr(module, name, copies.setdefault(id(buffer), buffer.detach().clone()))
    try:
        with extended(model), python_random_unchanged():
            yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for table, entries in held:
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(entries)
        for parameter, value in written:
            parameter.data.copy_(value)
        set_random_states(state)


def _written_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield parameters that a forward pass writes to; of torch's modules, only embeddings with max_norm do."""
    for module in modules:
        if getattr(module, "max_norm", None) is not None:
            yield from module.parameters(recurse=False)


class SameForEachPass:
    """The tensors that forward passes write to, restored so that each pass begins as the first one did.

    These are running statistics, vectors of power iterations and other buffers, and tables with ``max_norm``.
    Nothing else may write to them between the passes.

    Args:
        modules: The model, and the loss if that is a module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [child for module in modules for child in module.modules()]
        self._kept: list[_Kept] | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Restore everything after the one pass that runs inside."""
        is_first = self._kept is None
        kept = [*self._all()] if self._kept is None else self._kept
        try:
            yield
        finally:
            self._kept = kept
            for each in kept:
                each.restore(is_first)

    def _all(self) -> Iterator[_Kept]:
        for module in self._modules:
            written = {id(parameter) for parameter in _written_parameters([module])}
            parameters = [each for each in module.named_parameters(recurse=False) if id(each[1]) in written]
            for name, tensor in [*module.named_buffers(recurse=False), *parameters]:
                is_plain = tensor.layout is torch.strided and not is_distributed(tensor)
                if is_plain and not nn.parameter.is_lazy(tensor):
                    yield _Kept(module, name, tensor, tensor.detach().clone(), version(tensor))


@dataclass
class _Kept:
    """A tensor of a module, with a copy of its values.

    Args:
        version: Its version after the last pass.
        is_written: Whether some pass has written to it.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    copy: Tensor
    version: int
    is_written: bool = False

    def restore(self, is_first: bool) -> None:
        """Restore the tensor if a pass has written to it; the first pass compares its values."""
        is_there = getattr(self.module, self.name, None) is self.tensor
        if not (is_there and version(self.tensor) == self.version):
            self.is_written = True
        elif not self.is_written and (is_first or self._is_statistic):  # waits for the device
            self.is_written = not torch.equal(self.tensor, self.copy)
        if self.is_written:
            self.tensor.detach().copy_(self.copy)
            setattr(self.module, self.name, self.tensor)
            self.version = version(self.tensor)

    @property
    def _is_statistic(self) -> bool:
        """Tell whether batch normalisation may write to the tensor: it leaves versions as they are."""
        return self.module.training and getattr(self.module, "track_running_stats", False)
