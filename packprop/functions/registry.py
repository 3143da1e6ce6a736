"""The table of rules, and the entries of a call: by its rule, or by the fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from packprop.functions.building import as_it_was
from packprop.functions.entry import Call, Entry
from packprop.functions.fallback import fallback
from packprop.tensors.nesting import tensors_in

Rule = Callable[..., Iterable[Entry] | None]
"""From a call and its arguments to entries; ``None``: use the fallback."""


RULES: dict[Callable[..., Any], Rule] = {}
"""Torch function -> rule."""


LATER: dict[Rule, tuple[tuple[int, str], ...]] = {}
"""Rule that can wait -> the arguments that must be parameters for that; see ``made_later``."""


def made_later(*weights: tuple[int, str]) -> Callable[[Rule], Rule]:
    """Say that a rule can wait until its entries are asked for: most backward passes ask for none.

    Until then the call is kept with all that went in. So the entries of the rule must hold these tensors
    themselves, apart from small ones; autograd keeps them as well, then. What the rule saves must have gone in
    as it is (``SavedTensor``, ``rowwise``), and it must look at nothing else but shapes.

    Args:
        weights: Arguments, by place and name, that must be parameters; otherwise the entries hold less.
    """

    def note(rule: Rule) -> Rule:
        LATER[rule] = weights
        return rule

    return note


def can_wait(call: Call) -> bool:
    """Whether the entries of a call may be made later, without keeping more than they would."""
    rule = RULES.get(call.function)
    if rule is None:
        return True  # the fallback holds the call as it is
    weights = LATER.get(rule)
    if weights is None:
        return False
    args, kwargs = call.args, call.kwargs
    for place, name in weights:
        if not call.consumes(args[place] if place < len(args) else kwargs.get(name)):
            return False
    return CHANGEABLE.isdisjoint(map(type, (*args, *kwargs.values())))


CHANGEABLE = frozenset({list, dict})
"""Types of arguments that the caller may change after the call."""


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
    empty = any(not parameter.numel() for parameter in call.parameters)  # rules divide by extents
    rule = None if empty or _has_complex_numbers(call) else RULES.get(call.function)
    with as_it_was(call):
        by_rule = list(rule(call, *call.args, **call.kwargs) or ()) if rule else []
        by_rule = [entry for entry in by_rule if call.trains(entry.parameter)]
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
