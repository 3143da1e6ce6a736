"""The private behaviour of PyTorch that `eager_backward` relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packprop.engine.eager import eager_backward, pieces, reach
from packprop.engine.tensors import hooks
from tests.eager.branches import WEIGHT, needs_question, network, scalar


def test_what_eager_backward_relies_on_in_private() -> None:
    """Each line checks one private part of PyTorch; comments in `engine/eager` say why."""
    leaf = torch.ones(2, requires_grad=True)
    first, second = leaf * 2, leaf * 3
    assert reach.clock() < reach.clock()  # Node._sequence_nr
    assert reach.number_of_node(first.grad_fn) < reach.number_of_node(second.grad_fn) < reach.clock()
    assert first.grad_fn.next_functions[0][0].variable is leaf
    assert type(first.grad_fn.next_functions[0][0]) is reach._ACCUMULATE_GRAD
    before = pieces.version(leaf)  # Tensor._version, shared by what detach() returns
    with torch.no_grad():
        leaf.detach().add_(1)
    assert pieces.version(leaf) == before + 1
    calls: list[int] = []
    leaf.register_hook(lambda g: calls.append(1))
    with hooks.undisturbed([leaf]):  # Tensor._backward_hooks
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == []
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == [1]
    assert pieces.put_together(*map(list, pieces_of({"a": (leaf, 1)})))[0] == {"a": (leaf, 1)}
    if needs_question.args[0]:
        return
    assert pieces._hooks_in_force() is None  # _top_saved_tensors_default_hooks
    with torch.autograd.graph.save_on_cpu():
        assert pieces._hooks_in_force() is not None


def pieces_of(argument: Any) -> tuple[list[Any], list[Any]]:
    leaves, spec = pieces.take_apart(argument)
    return leaves, [spec]


def test_the_last_backward_pass_is_known_to_be_the_last() -> None:
    from packprop.engine.recording.marks import graph_is_kept

    seen: list[bool] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(graph_is_kept())
            return g

    value = Ask.apply(torch.ones((), requires_grad=True))
    value.backward(retain_graph=True)
    value.backward()
    assert seen == [True, False]


def test_the_node_is_recognisable() -> None:
    value = eager_backward(scalar, network()[1])
    assert type(value.grad_fn).__name__ == value.grad_fn.name() == "EagerBackward"
    leaves = {id(getattr(node, "variable", None)) for node, _ in value.grad_fn.next_functions}
    assert id(WEIGHT) in leaves
