"""The table of rules, and the entries of a call: by its rule, or by the fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from packprop.functions.entry import Call, Entry
from packprop.functions.fallback import fallback
from packprop.tensors.nesting import tensors_in

Rule = Callable[..., Iterable[Entry] | None]
"""From a call and its arguments to entries; ``None``: use the fallback."""


RULES: dict[Callable[..., Any], Rule] = {}
"""Torch function -> rule."""


def register_use(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Say how parameters enter a torch function, or an overridable function of your own.

    The decorated rule is called as ``rule(call, *args, **kwargs)`` with the arguments of the function and
    returns entries, made with ``affine``, ``scaled`` or ``Entry`` itself; ``None`` means: use the fallback.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def entries_of(call: Call) -> list[Entry]:
    """One entry for each parameter of a call: by its rule, or by the fallback."""
    rule = None if _has_complex_numbers(call) else RULES.get(call.function)
    by_rule = list(rule(call, *call.args, **call.kwargs) or ()) if rule else []
    by_rule = [entry for entry in by_rule if entry.parameter.requires_grad]
    described = {id(entry.parameter) for entry in by_rule}
    return by_rule + [
        fallback(call, parameter)
        for parameter in call.parameters
        if id(parameter) not in described and id(call.unexpanded(parameter)) not in described
    ]


def _has_complex_numbers(call: Call) -> bool:
    """Whether a call takes complex numbers: rules are written for real ones.

    A real parameter gets the real part of the cotangent times the conjugate of what multiplies the parameter.
    Autograd knows that of every function, and so does the fallback.
    """
    return any(tensor.is_complex() for tensor in tensors_in((call.args, call.kwargs)))
