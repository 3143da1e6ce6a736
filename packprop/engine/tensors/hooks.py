"""The user's hooks on a part of the autograd graph: they run in the user's own pass, and in no other.

# NOTE [Quiet hooks]
packprop differentiates a graph more often than its user does: to find samples, once for each column, twice for
a Hessian. Hooks on tensors, nodes and modules belong to the user's pass alone. While packprop differentiates,
each hook has a stand-in that does nothing, in the dictionary in which autograd looks up the hook. So a hook
that is removed meanwhile is gone, and the order stays. Nothing shows the hooks of a node, but the handle of any
hook on it knows this dictionary. ``retain_grad`` cannot be switched off: packprop drops the ``.grad`` that it
leaves before the next gradient is added to it, and restores the user's own at the end. A node that also does
something else only hands its gradients on in the meantime.

``Tensor._backward_hooks`` is the dictionary of a tensor. It is private, and only this file uses it: the public
API lets only the owner of a hook remove it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from packprop.engine.tensors.random import Draws
from packprop.engine.tensors.state import version
from packprop.engine.tensors.traced import not_traceable
from packprop.errors import PackpropError

HookDictionary = MutableMapping[int, Any]
"""Hooks by number, as autograd keeps them."""


NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def dictionary_of(tensor: Tensor) -> HookDictionary | None:
    """Return the hooks on a tensor; ``None`` if it never had one."""
    hooks: HookDictionary | None = tensor._backward_hooks
    return hooks


def is_hooked(tensor: Tensor) -> bool:
    """Tell whether user code runs when a gradient arrives at a tensor."""
    return bool(hooked([tensor]))


def hooked(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors among some at which user code runs when a gradient arrives."""
    return [tensor for tensor in tensors if tensor._backward_hooks or tensor.retains_grad]


def has_late_hooks(tensor: Tensor) -> bool:
    """Tell whether user code runs when the gradient of a tensor has been accumulated.

    ``Tensor._post_accumulate_grad_hooks`` is private, and only this file uses it: nothing public tells whether
    there are any.
    """
    return bool(tensor._post_accumulate_grad_hooks)


def dictionaries_of_node(node: Any) -> tuple[HookDictionary, HookDictionary]:
    """Return the hooks that run before a node, and those after it: a handle knows which dictionary it is in."""
    first, second = node.register_prehook(_stand_in), node.register_hook(_stand_in)
    before, after = first.hooks_dict_ref(), second.hooks_dict_ref()
    del before[first.id], after[second.id]
    return before, after


def meet_users_hooks(nodes: Iterable[Any]) -> bool:
    """Tell whether any of some nodes has a hook that is not packprop's own."""
    for node in nodes:
        for hooks in dictionaries_of_node(node):
            if hooks and has_users_hooks(hooks):
                return True
    return False


def has_users_hooks(hooks: HookDictionary) -> bool:
    """Tell whether any of some hooks is not packprop's own."""
    return not all(map(_is_own, hooks.values()))


def undisturbed(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Keep the hooks on tensors quiet while the block inside differentiates with respect to them."""
    chosen = hooked(tensors)
    return Hooks(chosen).quiet() if chosen else NOTHING


class Hooks:
    """The user's hooks on a part of the graph; see NOTE [Quiet hooks].

    Args:
        tensors: Tensors that have hooks, or retain their gradient.
        dictionaries: Further hooks, as autograd keeps them.
        doers: Nodes that hand gradients on and also do something else, each with a function that only hands on.
        own: Nodes of the user's own functions, whose backward function may draw random numbers.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        dictionaries: Iterable[HookDictionary] = (),
        doers: Iterable[tuple[Any, Callable[..., Any]]] = (),
        own: Iterable[Any] = (),
    ) -> None:
        chosen = list({id(tensor): tensor for tensor in tensors}.values())
        inside, at_leaves = [*dictionaries], list[HookDictionary]()
        for tensor in chosen:
            if hooks := dictionary_of(tensor):
                (at_leaves if tensor.is_leaf else inside).append(hooks)
        self.dictionaries = list({id(hooks): hooks for hooks in (*inside, *at_leaves)}.values())
        """The hooks on tensors and nodes, as autograd keeps them."""
        self._retaining = [tensor for tensor in chosen if tensor.retains_grad]
        self._doers, self._own, self._draws = list(doers), list(own), Draws()
        self.are_inside = bool(inside or self._retaining or self._doers)
        """True if there are hooks besides those on leaves, or nodes that do something else."""
        self.are_any = bool(self.dictionaries or self._retaining or self._doers)
        """True if there are hooks at all, or nodes that do something else."""
        self._quieted: contextlib.ExitStack | None = None

    def require_none(self) -> None:
        """Refuse hooks if a pass is traced.

        Raises:
            NotTraceable: If there are any.
        """
        if self.are_any:
            raise not_traceable(
                "a hook on a tensor, a node, a parameter or a module that is called in the backward pass",
                "a replay calls no Python function, so the hook would not be called again",
            )

    def owners(self) -> list[Any]:
        """Return the objects that the hooks are methods of; for functions, the functions."""
        return [owner_of(hook) for hooks in self.dictionaries for hook in hooks.values()]

    def quiet(self) -> AbstractContextManager[None]:
        """Silence every hook inside, and take back what own backward functions draw."""
        has_some = self.are_any or self._own
        return self._switched(True) if has_some and self._quieted is None else NOTHING

    def heard(self) -> AbstractContextManager[None]:
        """Let every hook run again inside ``quiet``."""
        return NOTHING if self._quieted is None else self._switched(False)

    def refusing_changes(self, error: Callable[[], PackpropError]) -> AbstractContextManager[None]:
        """Make a hook that changes a gradient raise an error inside."""
        return self._replaced(lambda hook: partial(_unchanging, hook, error)) if self.are_any else NOTHING

    @contextlib.contextmanager
    def _switched(self, quiet: bool) -> Iterator[None]:
        self._switch(quiet)
        try:
            yield
        finally:
            self._switch(not quiet)

    def _switch(self, quiet: bool) -> None:
        if not quiet:
            stack, self._quieted = self._quieted, None
            if stack is not None:
                stack.close()
            return
        with contextlib.ExitStack() as stack:
            for tensor in self._retaining:
                stack.callback(setattr, tensor, "grad", tensor.grad)
            stack.enter_context(self._replaced(lambda _: _stand_in))
            for tensor in self._retaining:
                stack.callback(tensor.register_hook(partial(_drop_gradient, tensor)).remove)
            own = [(node, partial(self._draws.call, node.apply)) for node in self._own]
            for node, hand_on in (*self._doers, *own):
                node.apply = hand_on  # the engine calls it: replaced for this node alone
                stack.callback(node.__dict__.pop, "apply", None)
            self._quieted = stack.pop_all()

    @contextlib.contextmanager
    def _replaced(self, replacement: Callable[[Any], Any]) -> Iterator[None]:
        """Put another function in the place of each hook inside."""
        own = [dict(hooks) for hooks in self.dictionaries]
        for hooks in self.dictionaries:
            for number, hook in hooks.items():
                if not _is_own(hook):
                    hooks[number] = replacement(hook)
        try:
            yield
        finally:
            for hooks, before in zip(self.dictionaries, own, strict=True):
                for number in hooks.keys() & before.keys():
                    hooks[number] = before[number]


NO_HOOKS = Hooks()
"""The hooks on a part of the graph that has none."""


def _is_own(hook: Any) -> bool:
    """Tell whether a hook is packprop's own, and not a stand-in for a hook of the user."""
    while isinstance(hook, partial) and hook.func is not _unchanging:
        hook = hook.func
    return hook is not _stand_in and str(getattr(hook, "__module__", "")).startswith("packprop.")


def owner_of(hook: Any) -> Any:
    """Return the object that a hook is a method of, else the hook."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return hook if owner is None else owner


def _stand_in(*_: Any) -> None:
    """Do nothing, in a hook's place."""


def _drop_gradient(tensor: Tensor, _: Any) -> None:
    tensor.grad = None


def _unchanging(hook: Callable[..., Any], error: Callable[[], PackpropError], *given: Any) -> Any:
    """Call a hook, and refuse its result if that is another gradient."""
    before = _listed(given[0])
    versions = [version(gradient) for gradient in before]
    returned = hook(*given)
    after = before if returned is None else _listed(returned)
    same = len(after) == len(before) and all(new is old for new, old in zip(after, before, strict=False))
    if not same or versions != [version(gradient) for gradient in before]:
        raise error()
    return returned


def _listed(gradients: Any) -> list[Any]:
    """Return the gradients of a tensor or a node as a list, without ``None``."""
    return [each for each in (gradients if isinstance(gradients, tuple) else [gradients]) if each is not None]
