"""Marks that recording leaves on the nodes of the autograd graph, where a backward pass finds them.

# NOTE [Hooks on tensors]
Autograd keeps the hooks of a tensor on the node that made it, even when nobody holds the tensor any more, and
nothing shows them there. packprop differentiates a graph more often than its user does, and must keep these
hooks quiet (NOTE [Quiet hooks]). So once this file is imported, ``Tensor.register_hook`` also leaves the
dictionary of the hooks in the ``metadata`` of that node, and ``retain_grad`` leaves a reference to its tensor.
Otherwise, both work as before.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from packprop.engine.functions.losses.description import input_of
from packprop.engine.functions.losses.read import loss_of_node
from packprop.engine.functions.nodes import name_of_node, number_of_node
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.dry import TensorSpec, is_dry_run
from packprop.engine.tensors.hooks import dictionary_of
from packprop.engine.tensors.nesting import tensors_of_call
from packprop.engine.tensors.state import memory_of, version

LOSS, TOLD, OUTPUT, HOOKS, RETAINS = (
    f"packprop.{mark}" for mark in ("loss", "told", "output", "hooks", "retains")
)
"""Keys of the marks in the ``metadata`` of a node; ``TOLD`` marks a loss whose node tells its call."""


HANDLES, AXIS = "_packprop_handles", "_packprop_sample_axis"
"""Attributes of an extended module: the handles of its hooks; the declared axis of samples, if there is one."""


class Extended(weakref.WeakKeyDictionary[nn.Module, str]):
    """Extended modules in the order in which they were extended, each with a title that ranks share.

    Ranks call ``extend`` for the same models in the same order. So the title is the number of that call: what a
    rank has called since, and which modules are gone, makes no difference.
    """

    numbered = 0
    """The number of models with parameters that the user has extended."""

    def number(self, module: nn.Module) -> None:
        """Add a module that the user extends."""
        if module not in self and next(module.parameters(), None) is not None:
            self[module] = f"model {self.numbered}"
            self.numbered += 1

    def add(self, module: nn.Module, title: str = "") -> None:
        """Add a module, unless it is there."""
        self.setdefault(module, title or type(module).__name__)

    def discard(self, module: nn.Module) -> None:
        """Remove a module if it is there."""
        self.pop(module, None)


EXTENDED = Extended()
"""Modules that ``extend`` was called on, and their copies: a pass must not miss any of their parameters."""


class Walks(dict[Any, Any]):
    """The walks that passes keep for later ones; copies are empty, because walks refer to parameters."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Walks, ()


class Handles(list[RemovableHandle]):
    """The handles of the hooks on an extended module; copied with it, they note the copy as extended.

    They also hold the walks that passes keep for later ones, because the garbage collector only sees a circle
    through a parameter and a user's hook on it if the module itself begins the circle.
    """

    def __init__(self, module: nn.Module | None, handles: Iterable[RemovableHandle]) -> None:
        super().__init__(handles)
        self._module = None if module is None else weakref.ref(module)
        self.walks = Walks()

    def __reduce__(self) -> tuple[Any, ...]:
        module = None if self._module is None else self._module()
        title = "" if module is None else f"copy of {EXTENDED.get(module, '')}"
        return _copied_handles, (module, [*self], title)


def _copied_handles(module: nn.Module | None, handles: list[RemovableHandle], title: str = "") -> Handles:
    if module is not None:
        EXTENDED.add(module, title)
    return Handles(module, handles)


def _described(value: Any) -> Any:
    """Return the same nesting of tuples, lists and dictionaries, with specifications in place of tensors.

    Raises:
        TypeError: For a value of any other class, which may hold tensors.
    """
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map(_described, value))
    if kind is dict:
        return {key: _described(item) for key, item in value.items()}
    if kind.__module__ not in ("builtins", "torch"):
        raise TypeError
    return value


@dataclass
class ForwardCall:
    """A call of an extended model.

    Args:
        module: Returns the module that was called; ``None`` if it is gone.
        declared: The declared sample axis of the loss's input; ``None`` if none was declared.
        args: The positional arguments of the call, with tensors replaced by their specifications; ``None`` if
            any argument is neither a tensor, nor a plain value, nor a tuple, list or dictionary of these.
        kwargs: The keyword arguments, likewise.
        leaves: Inputs that are leaves and require gradients: they are data, not parameters.
        storages: The memory of the inputs, which autograd need not keep.
        autocast: The regions that the call ran in.
    """

    module: Callable[[], nn.Module | None]
    declared: int | None = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    leaves: list[weakref.ref[Tensor]] = field(default_factory=list, init=False)
    storages: list[weakref.ref[UntypedStorage]] = field(default_factory=list, init=False)
    autocast: AutocastRegions = field(default_factory=AutocastRegions.now, init=False)

    def __post_init__(self) -> None:
        has_data = not is_dry_run()
        for tensor in tensors_of_call(self.args, self.kwargs, as_far_as_readable=True):
            memory = memory_of(tensor) if has_data else None
            if memory is not None:
                self.storages.append(weakref.ref(memory))
            if tensor.requires_grad and tensor.is_leaf:
                self.leaves.append(weakref.ref(tensor))
        try:
            self.args, self.kwargs = _described(self.args), _described(self.kwargs)
        except Exception:  # of other classes, without shapes or strides, or in a circle
            self.args = self.kwargs = None

    @functools.cached_property
    def has_parameters(self) -> bool:
        """Tell whether the module that was called has parameters, or is gone and may have had some."""
        module = self.module()
        return module is None or next(module.parameters(), None) is not None


def called_modules(forwards: Iterable[ForwardCall]) -> list[nn.Module]:
    """Return the extended modules that were called, each once."""
    modules = (forward.module() for forward in forwards)
    return list({id(module): module for module in modules if module is not None}.values())


@dataclass(eq=False)
class RecordedLoss:
    """One call of a loss function, left on the node that it made.

    Args:
        edge: The edge of the input, which had this ``shape`` and ``version`` when the loss was called.
        held: Whether the arguments are kept although a backward pass frees the graph.
        released: Whether the arguments were dropped.
        without_input: Whether a single NaN, expanded, has replaced the input to save its memory.
        number: The sequence number of the loss's node; losses that are called later have larger numbers.
        declared: The declared sample axis of the input; ``None`` if none was declared.
        documents: The declared document of each position of the input; ``None`` if none were declared.
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
    number: int = 0
    declared: int | None = None
    documents: Tensor | None = None

    @property
    def name(self) -> str:
        """The name of the function, for messages; ``nll_loss`` after ``log_softmax`` is ``cross_entropy``."""
        if self.function is F.nll_loss and name_of_node(self.edge.node) == "LogSoftmax":
            return F.cross_entropy.__name__
        return str(getattr(self.function, "__name__", self.function))

    @property
    def input(self) -> Tensor:
        """The argument of the loss that is the model's output."""
        tensor = input_of(self.function, self.args, self.kwargs)
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def others(self) -> list[GradientEdge]:
        """The edges of the other arguments that are part of a graph."""
        given = self.input
        tensors = [each for each in tensors_of_call(self.args, self.kwargs) if each is not given]
        return [get_gradient_edge(tensor) for tensor in tensors if tensor.grad_fn is not None]

    def drop_input(self) -> None:
        """Replace the input by a single NaN, expanded to the shape of the input."""
        given = self.input
        stand_in = given.new_full((), torch.nan).expand(given.shape)
        self.args = tuple(stand_in if value is given else value for value in self.args)
        self.kwargs = {name: stand_in if value is given else value for name, value in self.kwargs.items()}
        self.without_input = True

    def release(self, _: Any = None) -> None:
        """Drop the arguments when a backward pass frees the graph that they belong to."""
        if not self.held and not graph_is_kept():
            self.args, self.kwargs, self.released = (), {}, True


def unmarked_loss(node: Node) -> RecordedLoss | None:
    """Return the loss that a node tells without a mark; ``None`` if the loss's input needs no gradient."""
    read = loss_of_node(node)
    if read is None:
        return None
    given = read[1][0]
    return RecordedLoss(*read, given.shape, version(given), number=number_of_node(node))


marks_of: Callable[[Node], dict[str, Any]] = operator.attrgetter("metadata")
"""Returns the dictionary of marks of a node: a property, which torch types as a method."""


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of PyTorch by what ``make`` makes of it, also if packprop is loaded again."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _noted(register_hook: Callable[..., Any]) -> Callable[..., Any]:
    def register(tensor: Tensor, hook: Any) -> Any:
        handle = register_hook(tensor, hook)
        hooks = dictionary_of(tensor)
        if tensor.grad_fn is not None and hooks is not None:
            noted = marks_of(tensor.grad_fn).setdefault(HOOKS, [])
            if not any(hooks is known for known in noted):
                noted.append(hooks)
        return handle

    return register


def _retained(retain_grad: Callable[..., Any]) -> Callable[..., Any]:
    def retain(tensor: Tensor) -> None:
        retain_grad(tensor)
        if tensor.grad_fn is not None:
            marks_of(tensor.grad_fn).setdefault(RETAINS, []).append(weakref.ref(tensor))

    return retain


replace(Tensor, "register_hook", _noted)
replace(Tensor, "retain_grad", _retained)


def nodes_above(nodes: Iterable[Node | None], ends: Iterable[Node | None] = ()) -> Iterator[Node]:
    """Yield nodes and all nodes that they were computed from, each once; stop at ``ends``, without these."""
    stack = [node for node in dict.fromkeys(nodes) if node is not None]
    seen = {*stack, *ends}
    while stack:
        node = stack.pop()
        yield node
        for above, _ in node.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                stack.append(above)


def graph_is_kept() -> bool:
    """Tell whether the running backward pass retains the graph.

    No public function tells this. If packprop held inputs longer than autograd, a loop that still holds its
    last loss would take twice the memory.
    """
    return bool(_keep_graph())


_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
