"""The table of rules, by node: PyTorch's own nodes by name, and users' functions by their class."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_calls import Form, NodeCall
from packprop.engine.functions.nodes import function_of, short_name
from packprop.engine.functions.verdicts import Verdicts
from packprop.errors import BadInput

NodeRule = Callable[[NodeCall], Entry | None]
"""Maps a node and the place of a parameter to its entry; ``None`` to call the node for each sample."""


class Rule(NamedTuple):
    """A rule of packprop or of a user.

    Args:
        entry_of: The rule.
        form: The requirement of the rule on a leaf that only changed its form.
        proven: Calls, by form and layouts, where the rows of a user's rule summed to the gradient; ``None``
            for a rule of packprop.
    """

    entry_of: NodeRule
    form: Form = "entries"
    proven: Verdicts | None = None


RULES: dict[Any, Rule] = {}
"""Rules by the name of one of PyTorch's own nodes, or by the class of a user's function."""


def rule_of(*names: str, form: Form = "entries") -> Callable[[NodeRule], NodeRule]:
    """Register a rule of packprop for nodes with these names."""

    def register(rule: NodeRule) -> NodeRule:
        RULES.update(dict.fromkeys(names, Rule(rule, form)))
        return rule

    return register


def register_use(
    *functions: type[torch.autograd.Function] | str,
) -> Callable[[NodeRule], NodeRule]:
    """Register a rule for parameters of a ``torch.autograd.Function`` of your own.

    packprop calls the decorated rule as ``rule(call)`` with a ``NodeCall``: the function's node on the graph,
    and one parameter among its arguments. The rule returns the parameter's entry, made with ``affine``,
    ``scaled`` or ``Entry`` itself. If it returns ``None``, packprop calls the function's backward for each
    sample. Functions that consist of functions of torch need no rule.

    Args:
        functions: Classes of functions; or names of nodes, from ``tensor.grad_fn.name()``, for functions of
            libraries in another language.

    Raises:
        BadInput: If an argument is neither, or there is no argument.
    """
    for each in functions or (None,):
        is_function = isinstance(each, type) and issubclass(each, torch.autograd.Function)
        if not is_function and not (isinstance(each, str) and each):
            raise BadInput(
                "register_use(...) was called.",
                "no function" if each is None else f"argument {each!r}",
                "a rule belongs to a class derived from torch.autograd.Function, or to a node of the graph by "
                "its name; functions made of functions of torch need no rule",
                "decorate the rule with @packprop.register_use(MyFunction), or with "
                "@packprop.register_use(output.grad_fn.name())",
            )

    def register(rule: NodeRule) -> NodeRule:
        for each in functions:
            RULES[short_name(each) if isinstance(each, str) else each] = Rule(rule, "shape", Verdicts())
        return rule

    return register


def rule_for(node: Node) -> Rule | None:
    """Return the rule for a node; ``None`` if there is none."""
    if current.ignored:
        return None
    if isinstance(node, BackwardCFunction):
        return RULES.get(function_of(node)) or RULES.get(node.name())
    return RULES.get(short_name(node.name()))


def rules_named(names: Iterable[str]) -> list[Rule | None]:
    """Return the rule, or ``None``, for each of PyTorch's own nodes with these short names."""
    return [None if current.ignored else RULES.get(name) for name in names]


class _Current(threading.local):
    ignored: bool = False
    trusted: bool = False


current = _Current()
"""The state of this thread: whether it ignores all rules, and whether it trusts rules of users."""


@contextlib.contextmanager
def _switched_on(name: str) -> Iterator[None]:
    """Switch a flag of this thread on inside the context."""
    before = getattr(current, name)
    setattr(current, name, True)
    try:
        yield
    finally:
        setattr(current, name, before)


def without_rules() -> AbstractContextManager[None]:
    """Ignore all rules inside the context, in this thread: packprop calls each node for each sample."""
    return _switched_on("ignored")


def trusting_rules() -> AbstractContextManager[None]:
    """Trust the rows of users' rules without a check inside the context, in this thread."""
    return _switched_on("trusted")
