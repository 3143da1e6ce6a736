"""A step's batch, run again: a pass that leaves nothing behind.

# NOTE [Repeated pass]
The user has already called ``backward()`` in the step, so a second pass may add to no ``.grad``: of the model,
of a head that is not monitored, of a temperature. packprop runs the forward pass again, and sweeps its
graph on its own, as for a batch of a data set: no gradient reaches a leaf, and no hook of the user's runs,
such as one in which an optimizer steps. The forward pass may write to buffers; they are put back. Other ranks
take no part: see NOTE [One rank alone].
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from packprop.engine.context import Backpack
from packprop.engine.graph import Graph, walk
from packprop.engine.passes import (
    BackwardPass,
    Request,
    default_chunk_sizes,
    samples_of_nothing,
    settle_loss_inputs,
)
from packprop.engine.recording import SameForEachPass, extended, record
from packprop.engine.samples import check_graph
from packprop.engine.tensors import random_numbers_from, random_states
from packprop.engine.user_pass import BackwardCall
from packprop.errors import BadInput, PackpropError
from packprop.extensions.first_order import BatchL2Grad
from packprop.monitor.own_rank import silent, without_exchange
from packprop.types import Extension

ASKED = "monitor.check(loss, again) ran a step again."


def norms_again(model: nn.Module, again: Callable[[], Tensor], extension: BatchL2Grad) -> Tensor:
    """Return norms over all parameters of a model; see NOTE [Repeated pass].

    Args:
        model: The model that is monitored.
        again: Runs the forward pass of the batch, and returns its loss.
        extension: Says for which samples, or for the tokens of which samples.

    Raises:
        BadInput: If ``again`` returns no loss, or calls ``backward()``.
        PackpropError: If samples are mixed, as for ``backpack``; if no parameter of the model is in the loss;
            if ranks would exchange values.
    """
    drawn = random_numbers_from(random_states())
    with drawn, torch.enable_grad(), _left_as_they_are(model), extended(model):
        with _gradients_aside(model), record(), _NoBackward():
            loss = again()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise BadInput(
                ASKED,
                f"again(), which returned {what}",
                "it is not a loss with a graph",
                "give lambda: loss_function(model(x), y)",
            )
        graph = walk([loss], [None], None)
        try:
            return _norms(model, graph, extension)
        finally:
            graph.release(keep=False)


def _norms(model: nn.Module, graph: Graph, extension: BatchL2Grad) -> Tensor:
    """Return norms ``[n]``, or of tokens ``[n, t]``."""
    nothing = samples_of_nothing(graph)
    if nothing is not None:
        return torch.zeros((nothing,) if extension.per == "sample" else (nothing, 0), device="cpu")
    settle_loss_inputs(graph, [extension])
    check_graph(graph)
    own = {id(parameter) for parameter in model.parameters()}
    squares: list[Tensor] = []

    def done(leaf: Tensor, found: dict[Extension, list[Any]]) -> None:
        if id(leaf) in own and extension in found:
            squares.append(extension.finish(found[extension], graph.samples).double().cpu())

    sizes = default_chunk_sizes(next((leaf.device for leaf in graph.leaves()), None))
    BackwardPass(Request(graph, [extension], sizes), done).run(None)
    if not squares:
        raise PackpropError(
            ASKED,
            f"{type(model).__name__}, which is monitored",
            "the loss that again() returned depends on none of its parameters",
            "compute the loss of the batch with the monitored model",
        )
    return torch.stack(squares).sum(0).sqrt()


class _NoBackward(Backpack):
    """Refuses a backward pass of the user, which would add gradients a second time."""

    def __init__(self) -> None:
        super().__init__([], None, None, False)

    def _backward(self, call: BackwardCall, backward: Callable[[], None]) -> None:
        raise BadInput(
            ASKED,
            "backward() inside again()",
            "the step already has its gradients, and this would add to them",
            "let again() return the loss: lambda: loss_function(model(x), y)",
        )


@contextlib.contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Hide the gradients of the model from ``again``, which may set them to zero."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextlib.contextmanager
def _left_as_they_are(model: nn.Module) -> Iterator[None]:
    """Restore, in the end, the buffers of the model and of every other module that is called inside.

    None of them exchanges anything with other ranks.
    """
    known: dict[int, nn.Module] = {}
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:

        def before(module: nn.Module, _: Any = None) -> None:
            if id(module) in known or threading.get_ident() != thread:
                return
            for child in module.modules():
                if id(child) not in known:
                    known[id(child)] = child
                    stack.enter_context(silent(ASKED, child))
            stack.enter_context(SameForEachPass([module]).around())

        before(model)
        stack.callback(register_module_forward_pre_hook(before).remove)
        with without_exchange(ASKED):
            yield
