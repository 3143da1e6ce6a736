"""Passes that leave a model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from packprop.engine.recording.switch import extend, extended
from packprop.engine.tensors.random import random_states, set_random_states
from packprop.engine.tensors.sharding import is_distributed
from packprop.errors import BadInput


@contextlib.contextmanager
def unchanged(model: nn.Module, asked: str) -> Iterator[None]:
    """Extend a model inside; afterwards put back its buffers, its attributes and the random state.

    Raises:
        BadInput: With the request ``asked``, if it is no module, or not initialised.
    """
    if not isinstance(model, nn.Module):
        extend(model)  # raises, and says what is wrong
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise BadInput(
                asked,
                f"parameter {name!r}",
                "it is not initialised, and the pass would initialise it",
                "run one forward pass first",
            )
    modules = list(model.modules())
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
        with extended(model):
            yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for parameter, value in written:
            parameter.data.copy_(value)
        set_random_states(state)


def _written_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield parameters that a forward pass writes to; of torch's modules only embeddings with max_norm do."""
    for module in modules:
        if getattr(module, "max_norm", None) is not None:
            yield from module.parameters(recurse=False)


class SameForEachPass:
    """Restores whatever forward passes write to, so that each pass begins as the first one did.

    These are running statistics, vectors of power iterations and other buffers, and tables with ``max_norm``,
    which packprop refuses too late. The first pass copies all; later ones restore those that it has written to.

    Args:
        modules: The model, and the loss if that is a module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [child for module in modules for child in module.modules()]
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Restore everything after the one pass that runs inside."""
        kept = [*self._all()] if self._kept is None else self._kept
        try:
            yield
        finally:
            if self._kept is None:
                # waits for the device; versions do not tell: batch normalisation leaves them as they are
                self._kept = [
                    (module, name, tensor, copy)
                    for module, name, tensor, copy in kept
                    if getattr(module, name, None) is not tensor or not torch.equal(tensor, copy)
                ]
            for module, name, tensor, copy in self._kept:
                tensor.detach().copy_(copy)
                setattr(module, name, tensor)

    def _all(self) -> Iterator[tuple[nn.Module, str, Tensor, Tensor]]:
        for module in self._modules:
            written = {id(parameter) for parameter in _written_parameters([module])}
            parameters = [each for each in module.named_parameters(recurse=False) if id(each[1]) in written]
            for name, tensor in [*module.named_buffers(recurse=False), *parameters]:
                is_plain = tensor.layout is torch.strided and not is_distributed(tensor)
                if is_plain and not nn.parameter.is_lazy(tensor):
                    yield module, name, tensor, tensor.detach().clone()
