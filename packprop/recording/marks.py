"""What recording leaves on the nodes of the autograd graph, where a backward pass finds it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from packprop.functions.entry import Call, Entry
from packprop.functions.losses.description import input_of
from packprop.functions.nodes import LINEAR, is_change_of_view, name_of_node
from packprop.functions.registry import entries_of
from packprop.recording.inputs import InputSource
from packprop.tensors.hooks import HookDictionary, dictionary_of

USE, LOSS, OUTPUT, TRANSFORMED, REORDERS, MIXES, HOOKS, HOOKED, CHOSEN = (
    f"packprop.{mark}"
    for mark in ("use", "loss", "output", "transformed", "reorders", "mixes", "hooks", "hooked", "chosen")
)
"""Keys of the marks in the ``metadata`` of a node."""


HANDLES = "_packprop_handles"
"""Attribute of an extended module: the handles of its hooks."""


_COPIED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Copies of extended modules, with all modules inside of them, that were made since somebody asked."""


class _ExtendedModules(weakref.WeakSet[nn.Module]):
    """Modules that ``extend`` was called on, and copies of extended modules."""

    def __iter__(self) -> Iterator[nn.Module]:
        self._settle()
        return super().__iter__()

    def __contains__(self, module: object) -> bool:
        self._settle()
        return super().__contains__(module)

    def discard(self, module: nn.Module) -> None:
        """Forget a module."""
        _COPIED.discard(module)
        super().discard(module)

    def _settle(self) -> None:
        """Add those copies that are in no other module: while a copy is made, it has no parts yet."""
        copied = [*_COPIED]
        _COPIED.clear()
        if copied:
            parts = {
                child
                for each in (*copied, *super().__iter__())
                for child in each.modules()
                if child is not each
            }
            self.update(each for each in copied if each not in parts)


EXTENDED: weakref.WeakSet[nn.Module] = _ExtendedModules()
"""A pass must not miss any parameter of these."""


class Handles(list[RemovableHandle]):
    """The handles of the hooks on an extended module; copied with it, they note the copy as extended."""

    def __init__(self, module: nn.Module | None, handles: Iterable[RemovableHandle]) -> None:
        super().__init__(handles)
        self._module = None if module is None else weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_handles, (None if self._module is None else self._module(), [*self])


def _copied_handles(module: nn.Module | None, handles: list[RemovableHandle]) -> Handles:
    if module is not None:
        _COPIED.add(module)
    return Handles(module, handles)


@dataclass
class ForwardCall:
    """The outermost call that a use was recorded in.

    Args:
        module: The module that was called, or nothing inside ``record()``.
        sizes: Shapes of the tensors that went in.
        declared: The axis of what the loss takes that was declared to hold the samples, if one was.
        inputs: The tensors that went in, unless it is the call of a loss; they are not kept alive.
        leaves: Inputs that are leaves and require gradients: they are data, not parameters.
        reordered: Whether data may have decided the order of rows along any axis.
        arguments: What went in, tensors without their data.
        made: The tensors that came up while it was recorded, as far as they are still there.
    """

    module: Callable[[], nn.Module | None]
    sizes: list[torch.Size] = field(default_factory=list)
    declared: int | None = None
    inputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    leaves: list[weakref.ref[Tensor]] = field(default_factory=list)
    reordered: bool = False
    arguments: list[Any] = field(default_factory=list)
    made: Callable[[], Iterable[Tensor]] = tuple

    @property
    def has_parameters(self) -> bool:
        """Whether the module that was called has parameters."""
        module = self.module()
        return module is not None and next(module.parameters(), None) is not None

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter belongs to the module that was called, if there is one, or to an extended one."""
        module = self.module()
        if module is None:
            return True
        return any(parameter is own for each in (module, *EXTENDED) for own in each.parameters())


@dataclass(eq=False)
class Mixer:
    """A layer that mixed samples. Its name in the model is looked up when it is asked for.

    Args:
        forward: The outermost call that it was called in.
        kind: Name of its class.
        module: The layer, as long as it lives.
    """

    forward: ForwardCall
    kind: str
    module: Callable[[], nn.Module | None]

    @property
    def name(self) -> str:
        """What messages call it."""
        root, module = self.forward.module(), self.module()
        modules = () if root is None or module is None else root.named_modules()
        path = next((path for path, child in modules if child is module), "")
        return f"{path!r} ({self.kind})" if path else self.kind


@dataclass(eq=False)
class RecordedUse:
    """One call of a torch function that consumed trainable parameters, left on the nodes that it made.

    Args:
        name: Name of the function.
        made: How each parameter enters it, or the call that this is made of when it is asked for; ``None`` once
            the graph was freed.
        edges: Where the inputs that depend on samples came from.
        shapes: Shapes of its outputs.
        forward: The outermost call that it was recorded in.
        source: Where its inputs are found, if it does not hold them.
        held: Whether the inputs are kept although a backward pass frees the graph.
        reordered: Whether its inputs come from a function that takes rows out of their order.
        options: Axes, equations and other integers and texts that it was given.
        hooks: The user's hooks on its outputs: a sweep meets also those on outputs that lead nowhere.
    """

    name: str
    made: list[Entry] | Call | None
    edges: list[GradientEdge]
    shapes: list[torch.Size]
    forward: ForwardCall
    source: InputSource | None = None
    held: bool = False
    reordered: bool = False
    options: Any = None
    hooks: list[HookDictionary] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry] | None:
        """How each parameter enters it; ``None`` once the graph was freed."""
        if isinstance(self.made, Call):
            self.made = entries_of(self.made)
        return self.made

    def release(self, _: Any = None) -> None:
        """Drop the inputs when a backward pass frees the graph that they belong to."""
        if not self.held and not graph_is_kept():
            self.drop()

    def drop(self) -> None:
        """Forget the inputs."""
        self.made = self.source = None


@dataclass(eq=False)
class RecordedLoss:
    """One call of a loss function, left on the node that it made.

    Args:
        edge: Where its input came from.
        shape: Shape of its input.
        version: Version of its input when it was called.
        held: Whether the arguments are kept although a backward pass frees the graph.
        released: Whether the arguments were dropped.
        without_input: Whether numbers that are not there took the place of the input, to save its memory.
        number: Larger than that of any loss that was called before.
        documents: The document of each position of its input, if that was declared.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edge: GradientEdge
    shape: torch.Size
    version: int
    held: bool = False
    released: bool = False
    without_input: bool = False
    number: int = field(default_factory=itertools.count().__next__)
    documents: Tensor | None = None

    @property
    def input(self) -> Tensor:
        """The model's output that the loss was given."""
        tensor = input_of(self.function, self.args, self.kwargs)
        assert isinstance(tensor, Tensor)
        return tensor

    def drop_input(self) -> None:
        """Put NaN of the input's shape, of which one is in memory, in the place of the input."""
        given = self.input
        stand_in = given.new_full((), torch.nan).expand(given.shape)
        self.args = tuple(stand_in if value is given else value for value in self.args)
        self.kwargs = {name: stand_in if value is given else value for name, value in self.kwargs.items()}
        self.without_input = True

    def release(self, _: Any = None) -> None:
        """As ``RecordedUse.release``."""
        if not self.held and not graph_is_kept():
            self.args, self.kwargs, self.released = (), {}, True


def marks_of(node: Node) -> dict[str, Any]:
    """The dictionary of marks of a node (torch types this property as a method)."""
    return cast(dict[str, Any], node.metadata)


def edge_of(tensor: Tensor) -> GradientEdge:
    """``get_gradient_edge(tensor)``, at less cost where a node is there that is not written in Python."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def edge_before(changed: Tensor, edge: GradientEdge) -> GradientEdge:
    """Where the history of a tensor goes on that was changed in place, if it went on from ``edge`` before.

    A view gets a new history then: through the nodes that make the view, and that of the change, to where its
    base came from. The node that made the view before is in no graph any more.
    """
    node = changed.grad_fn
    if node is None or (edge.node, edge.output_nr) in node.next_functions:
        return edge
    while node is not None and name_of_node(node) in LINEAR:
        node = node.next_functions[0][0]
    if node is None or not is_change_of_view(node):
        return edge
    base, number = node.next_functions[0]
    return edge if base is None else GradientEdge(base, number)


def note_hooks(tensor: Tensor) -> None:
    """Leave a tensor's hooks on the node that made it: they run even if nobody holds the tensor any more."""
    if tensor.grad_fn is None:
        return
    hooks = dictionary_of(tensor)
    if hooks is None:
        return
    marks = marks_of(tensor.grad_fn)
    for noted in (marks.setdefault(HOOKS, []), *(use.hooks for use, _, _ in marks.get(USE, ()))):
        if not any(hooks is known for known in noted):
            noted.append(hooks)


def nodes_above(nodes: Iterable[Node | None], end: Node | None = None) -> Iterator[Node]:
    """Some nodes and everything that they were computed from, each once; not what lies behind ``end`` alone."""
    stack = [node for node in dict.fromkeys(nodes) if node is not None]
    seen = {*stack, end}
    while stack:
        node = stack.pop()
        yield node
        for above, _ in node.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                stack.append(above)


def graph_is_kept() -> bool:
    """Whether the running backward pass retains the graph.

    The engine's own answer is private, and is asked for here alone. No public function says whether what a node
    saved will be freed, and holding inputs longer than autograd does would double the memory of a loop that
    still holds its last loss.
    """
    return bool(_keep_graph())


_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
