"""A model that is run for once, and is afterwards as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from packprop.errors import BadInput
from packprop.recording.marks import EXTENDED, HANDLES
from packprop.recording.switch import extend, is_extended
from packprop.tensors.random import random_states, set_random_states


@contextlib.contextmanager
def unchanged(model: nn.Module, asked: str) -> Iterator[None]:
    """Extend a model inside; afterwards put back its buffers, its attributes and the random state.

    Args:
        model: Any module.
        asked: What the user asked for, for messages.

    Raises:
        BadInput: If it is no module, or not initialised.
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
    # an embedding with max_norm is the one function of torch that writes into its parameter
    written = [
        (parameter, parameter.detach().clone())
        for module in modules
        if getattr(module, "max_norm", None) is not None
        for parameter in module.parameters(recurse=False)
    ]
    newly_extended = [module for module in modules if not is_extended(module)]
    was_extended, state = model in EXTENDED, random_states()
    copies: dict[int, Tensor] = {}
    for module, _, buffers in before:
        for name, buffer in buffers.items():
            setattr(module, name, copies.setdefault(id(buffer), buffer.detach().clone()))
    extend(model)
    try:
        yield
    finally:
        for module in newly_extended:
            for handle in vars(module).pop(HANDLES, ()):
                handle.remove()
        if not was_extended:
            EXTENDED.discard(model)
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for parameter, value in written:
            parameter.data.copy_(value)
        set_random_states(state)
