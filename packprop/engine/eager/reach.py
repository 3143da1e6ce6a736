"""The sources of a branch of the autograd graph: leaves, and tensors of the graph around it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.eager.choices import ASKED
from packprop.engine.eager.pieces import Job
from packprop.engine.functions.nodes import number_of_node
from packprop.engine.tensors.nesting import cells
from packprop.errors import PackpropError

Key = tuple[Any, int]
"""An identifier of a tensor of a graph: its node and output number; for a leaf, its `id` and 0."""

with torch.enable_grad():
    _ANY: Any = torch.empty(0, device="cpu", requires_grad=True).view(0)
_ACCUMULATE_GRAD: Any = type(_ANY.grad_fn.next_functions[0][0])

SEARCH_LIMIT = 20_000
"""The maximum number of objects behind a function that packprop searches for a tensor."""


def key_of(tensor: Tensor) -> Key:
    """Return the key of a tensor."""
    node = tensor.grad_fn
    return (id(tensor), 0) if node is None else (node, tensor.output_nr)


def clock() -> int:
    """Return a number between those of nodes made before and after the call; gradients must be enabled."""
    # NOTE [Inside and outside]
    # Nodes are numbered in the order of their creation, one count per thread: those of a branch lie
    # between the clock at its start and its value. Nothing else tells nodes of a branch, which may be
    # differentiated and freed, from those of the graph around it, which must be left alone.
    # The tensor is made on the spot, so that it obeys the mode that is on: fake tensors, counted tensors.
    return number_of_node(torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn)


def reached(
    output: Tensor, since: int, known: Mapping[Key, Tensor], job: Job
) -> tuple[dict[Key, Tensor], bool]:
    """Return the tensors that a branch starts from: its leaves, and tensors of the graph around it.

    Args:
        output: The value of the branch.
        since: The `clock` before it was computed.
        known: Tensors outside of the branch.
        job: Its job; packprop searches names for tensors outside.

    Returns:
        The tensors, and whether to keep the graph after its differentiation, because the end of the branch is
        in doubt.

    Raises:
        PackpropError: If no name leads to a tensor outside.
    """
    if threading.get_ident() != threading.main_thread().ident:
        # Nodes of another thread are numbered by that thread's count: look for tensors by name instead.
        known = {key_of(tensor): tensor for _, tensor in tensors_of(job)} | dict(known)
    root: Any = output.grad_fn
    if root is None:
        return {key_of(output): output}, False
    until, doubt = number_of_node(root), False
    sources: dict[Key, Tensor] = {}
    outside: set[Key] = set()
    seen: set[Any] = set()
    stack: list[Any] = [((root, output.output_nr),)]
    while stack:
        for node, number in stack.pop():
            if node is None or node in seen:
                continue
            if type(node) is _ACCUMULATE_GRAD:
                sources[id(node.variable), 0] = node.variable
            elif (node, number) in known or not since <= number_of_node(node) <= until:
                outside.add((node, number))
            else:
                seen.add(node)
                stack.append(node.next_functions)
        if outside and not stack:
            sources |= _by_name(outside, known, job)
            lost = outside - sources.keys()
            if lost and not _has_threads(output.device):
                raise _hidden(lost.pop()[0], job)
            # These nodes belong to the branch if it differentiates; if not, the graph is kept, which they need.
            doubt = doubt or bool(lost)
            seen |= {node for node, _ in lost}
            stack += [node.next_functions for node, _ in lost]
            outside.clear()
    return sources, doubt


def _has_threads(device: torch.device) -> bool:
    """Tell whether autograd computes gradients on this device, and makes their nodes, in a separate thread."""
    return device.type != "cpu"


def _by_name(edges: Collection[Key], known: Mapping[Key, Tensor], job: Job) -> dict[Key, Tensor]:
    """Return the tensors at edges out of a branch, if they are known or a name leads to them."""
    found = {edge: known[edge] for edge in edges if edge in known}
    if len(found) < len(edges):
        for _, tensor in tensors_of(job):
            if (key := key_of(tensor)) in edges:
                found.setdefault(key, tensor)
    return found


def _hidden(node: Any, job: Job) -> PackpropError:
    return PackpropError(
        ASKED,
        f"a tensor that {node.name()} made outside of {job.where}",
        "the function uses it, the graph outside holds it, and no name leads to it: neither the "
        "function's closure, globals, arguments nor attributes",
        "pass it to eager_backward as an input",
    )


def tensors_of(job: Job) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that a function can reach, or objects among its arguments, nearest first."""
    fn: Any = job.fn
    code = fn.forward if isinstance(fn, nn.Module) else fn.__call__  # a method, whose names lead on
    queue: deque[tuple[str, Any]] = deque([("", fn), ("", code), ("inputs", job.specs)])
    seen: set[int] = set()
    while queue and len(seen) < SEARCH_LIMIT:
        name, thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, type | ModuleType | str | bytes | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield name, thing
        else:
            queue.extend(_parts(name, thing))


def _parts(name: str, thing: Any) -> Iterable[tuple[str, Any]]:
    dot = f"{name}." if name else ""
    if isinstance(thing, FunctionType):
        yield from cells(thing)
        scope = thing.__globals__
        yield from ((key, scope[key]) for key in _names(thing.__code__) if key in scope)
        yield from _numbered(name, thing.__defaults__ or ())
        yield from (thing.__kwdefaults__ or {}).items()
        yield from vars(thing).items()
    elif isinstance(thing, MethodType):
        yield name, thing.__func__
        yield "self", thing.__self__
    elif isinstance(thing, partial):
        yield name, thing.func
        yield from _numbered(name, thing.args)
        yield from thing.keywords.items()
    elif isinstance(thing, nn.Module):
        yield from ((dot + key, part) for key, part in (*thing.named_parameters(), *thing.named_buffers()))
        yield from ((dot + key, child) for key, child in thing.named_children())
        yield from ((dot + key, part) for key, part in vars(thing).items() if key[0] != "_")
    elif isinstance(thing, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from _numbered(name, thing)
    elif hasattr(thing, "__dict__"):
        yield from ((dot + key, part) for key, part in vars(thing).items())


def _numbered(name: str, things: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{number}]", thing) for number, thing in enumerate(things))


def _names(code: CodeType) -> Iterator[str]:
    """Yield global names in a function's code and in that of its comprehensions and lambdas."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
