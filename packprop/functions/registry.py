"""The table of rules, by node: PyTorch's own nodes by name, and users' functions by their class."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.errors import BadInput
from packprop.functions.entry import Entry
from packprop.functions.node_calls import Form, NodeCall
from packprop.functions.nodes import function_of, short_name

NodeRule = Callable[[NodeCall], Entry | None]
"""From a node and the place of a parameter to its entry; ``None``: the node is called for each sample."""


class Rule(NamedTuple):
    """A rule, and what it needs of a leaf.

    Args:
        entry_of: The rule.
        form: What it needs of a leaf that only changed its form on the way.
        is_own: Whether a user registered it.
    """

    entry_of: NodeRule
    form: Form = "entries"
    is_own: bool = False


RULES: dict[Any, Rule] = {}
"""Name of a node of PyTorch's own, or class of a user's function -> rule."""


def rule_of(*names: str, form: Form = "entries") -> Callable[[NodeRule], NodeRule]:
    """Register a rule of the library for nodes with these names."""

    def register(rule: NodeRule) -> NodeRule:
        RULES.update(dict.fromkeys(names, Rule(rule, form)))
        return rule

    return register


def register_use(
    *functions: type[torch.autograd.Function] | str,
) -> Callable[[NodeRule], NodeRule]:
    """Say how parameters enter a ``torch.autograd.Function`` of your own.

    The decorated rule is called as ``rule(call)`` with a ``NodeCall``: the node that the function left on the
    graph, and one parameter that was given to it. It returns the parameter's entry, made with ``affine``,
    ``scaled`` or
    ``Entry`` itself; ``None`` means: call the function's backward for each sample. Functions that are made of
    functions of torch need no rule.

    Args:
        functions: Classes of functions; or names of nodes, as ``tensor.grad_fn.name()`` tells them, for
            functions that a library has written in another language.

    Raises:
        BadInput: If one of them is neither.
    """
    for each in functions or (None,):
        is_function = isinstance(each, type) and issubclass(each, torch.autograd.Function)
        if not is_function and not (isinstance(each, str) and each):
            raise BadInput(
                "register_use(...) was called.",
                "no function" if each is None else f"argument {each!r}",
                "a rule belongs to a class derived from torch.autograd.Function, or to a node of the graph by "
                "its name; functions made of functions of torch need none",
                "decorate the rule with @packprop.register_use(MyFunction), or with "
                "@packprop.register_use(output.grad_fn.name())",
            )

    def register(rule: NodeRule) -> NodeRule:
        for each in functions:
            RULES[short_name(each) if isinstance(each, str) else each] = Rule(rule, "shape", is_own=True)
        return rule

    return register


def rule_for(node: Node) -> Rule | None:
    """The rule for a node, if there is one."""
    if _current.ignored:
        return None
    if isinstance(node, BackwardCFunction):
        by_class = RULES.get(function_of(node))
        return by_class if by_class is not None else RULES.get(node.name())
    return RULES.get(short_name(node.name()))


def checked(call: NodeCall, rule: Rule) -> Entry | None:
    """The entry that a rule makes.

    Raises:
        BadInput: If a user's rule returns something else.
    """
    entry = rule.entry_of(call)
    if not rule.is_own or entry is None:
        return entry
    name = getattr(rule.entry_of, "__name__", repr(rule.entry_of))
    if not isinstance(entry, Entry) or entry.parameter is not call.operand.tensor:
        made = "an entry of another tensor" if isinstance(entry, Entry) else f"{type(entry).__name__}"
        raise BadInput(
            "A quantity beyond the gradient was asked for.",
            f"the rule {name} that is registered for {call.node.name()}",
            f"it returned {made}, where the entry of one parameter or None was expected",
            "return affine(call, ...), scaled(call, ...) or Entry(call.operand.tensor, ...); None leaves the "
            "parameter to PyTorch's own derivative of each sample",
        )
    return entry


class _Current(threading.local):
    ignored: bool = False


_current = _Current()
"""Whether this thread leaves rules aside."""


@contextlib.contextmanager
def without_rules() -> Iterator[None]:
    """Inside, no rule is known in this thread: each node is called for each sample."""
    before, _current.ignored = _current.ignored, True
    try:
        yield
    finally:
        _current.ignored = before
