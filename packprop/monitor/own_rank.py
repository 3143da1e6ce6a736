"""Passes that one rank runs alone, while the others continue to train.

# NOTE [One rank alone]
Usually a step is a spike on one rank, and this rank alone runs it again. So nothing in the repeated pass may
wait for other ranks: they would take its exchange for their next one, and all later ones would be off by one.
``DistributedDataParallel`` exchanges gradients when they are accumulated, which the repeated pass never does.
In its forward pass it may send buffers and, once, the order of its buckets. packprop switches this off for the
time of the pass, in every such module that is called, whoever holds it, and leaves the module ready for the
next pass of all ranks. Anything else that would exchange values raises an error before it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from packprop.engine.tensors import has_sharded_units, is_distributed, is_fully_sharded_before
from packprop.errors import PackpropError

EXCHANGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operations in which ranks exchange values."""


def require_whole(asked: str, model: nn.Module) -> None:
    """Refuse parameters that are sharded over processes, on all ranks alike.

    Raises:
        PackpropError: If there are any.
    """
    if not _is_in_group():
        return
    is_sharded = has_sharded_units(model) or is_fully_sharded_before([model])
    if is_sharded or any(is_distributed(parameter) for parameter in model.parameters()):
        raise PackpropError(
            asked,
            "parameters that are sharded over processes",
            "their values are on several ranks, and packprop.Monitor does not gather them",
            "train with DistributedDataParallel, or compute values with backpack(..., ranks='all')",
        )


@contextlib.contextmanager
def silent(asked: str, module: nn.Module) -> Iterator[None]:
    """Keep a ``DistributedDataParallel`` module from exchanging anything; see NOTE [One rank alone].

    Raises:
        PackpropError: If it computes in another precision than its parameters have.
    """
    if not isinstance(module, DistributedDataParallel):
        yield
        return
    if getattr(module, "mixed_precision", None) is not None:
        raise PackpropError(
            asked,
            "mixed_precision=... of DistributedDataParallel",
            "it keeps parameters in another precision until all ranks run a backward pass, which they do not",
            "use torch.autocast",
        )
    changed = {"require_backward_grad_sync": False, "require_forward_param_sync": False, "reducer": _Idle()}
    before = {name: vars(module)[name] for name in changed if name in vars(module)}
    try:
        vars(module).update({name: changed[name] for name in before})
        yield
    finally:
        vars(module).update(before)


class _Idle:
    """Stands in for the reducer of ``DistributedDataParallel``: there is nothing to rebuild or to prepare."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def without_exchange(asked: str) -> AbstractContextManager[object]:
    """Make a context that raises an error before any operation that exchanges values with other ranks."""
    if _is_in_group() and torch.distributed.get_world_size() > 1:
        return _WithoutExchange(asked)
    return contextlib.nullcontext()


def _is_in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _WithoutExchange(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, asked: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) in EXCHANGES:
            raise PackpropError(
                self._asked,
                f"{func}, in which all ranks exchange values",
                "other ranks do not run the step again: they would take this for their next exchange",
                "exchange values, such as the number of tokens on all ranks, before again() and not inside it",
            )
        return func(*args, **(kwargs or {}))
