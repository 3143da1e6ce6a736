"""What recording leaves on the nodes of the autograd graph, from where it is found again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.functions.entry import Entry
from packprop.functions.losses.description import input_of
from packprop.recording.inputs import Source

USE, LOSS, OUTPUT, MIXES = (f"packprop.{mark}" for mark in ("use", "loss", "output", "mixes"))


HANDLES = "_packprop_handles"


EXTENDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that ``extend`` was called on: their parameters must not be missed."""


@dataclass
class ForwardCall:
    """The outermost call that a use was recorded in.

    Args:
        module: The module that was called, or nothing inside ``record()``.
        sizes: Shapes of the tensors that went in.
        leaves: Inputs that are leaves and require gradients: they are data, not parameters.
        reordered: Whether data may have decided on the order of rows.
        arguments: What went in, tensors without their data.
    """

    module: Callable[[], nn.Module | None]
    sizes: list[torch.Size] = field(default_factory=list)
    leaves: list[weakref.ref[Tensor]] = field(default_factory=list)
    reordered: bool = False
    arguments: list[Any] = field(default_factory=list)

    @property
    def has_parameters(self) -> bool:
        """Whether the module that was called has parameters."""
        module = self.module()
        return module is not None and next(module.parameters(), None) is not None


@dataclass(eq=False)
class RecordedUse:
    """One call of a torch function that consumed trainable parameters, hung on the node that it made.

    Args:
        name: Name of the function.
        entries: How each parameter enters it; ``None`` once the graph was freed.
        edges: Where the inputs that depend on samples came from.
        shapes: Shapes of its outputs.
        forward: The outermost call that it was recorded in.
        source: Where its inputs are found, if it does not hold them.
    """

    name: str
    entries: list[Entry] | None
    edges: list[GradientEdge]
    shapes: list[torch.Size]
    forward: ForwardCall
    source: Source | None = None
    held: bool = False

    def release(self, _: Any = None) -> None:
        """Drop the inputs when a backward pass frees the graph that they belong to."""
        if not self.held and not graph_is_kept():
            self.drop()

    def drop(self) -> None:
        """Forget the inputs."""
        self.entries = self.source = None


@dataclass(eq=False)
class RecordedLoss:
    """One call of a loss function, hung on the node that it made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edge: GradientEdge
    shape: torch.Size
    version: int
    held: bool = False
    released: bool = False

    @property
    def input(self) -> Tensor:
        """The model's output that the loss was given."""
        tensor = input_of(self.function, self.args, self.kwargs)
        assert isinstance(tensor, Tensor)
        return tensor

    def release(self, _: Any = None) -> None:
        """As ``RecordedUse.release``."""
        if not self.held and not graph_is_kept():
            self.args, self.kwargs, self.released = (), {}, True


def marks_of(node: Node) -> dict[str, Any]:
    """The dictionary of a node that marks are kept in (typed as a method in torch, and a property)."""
    return cast(dict[str, Any], node.metadata)


def graph_is_kept() -> bool:
    """Whether the running backward pass retains the graph.

    The engine's own answer is private, and stands here alone: no public function says whether what a node saved
    will be freed, and holding inputs any longer than autograd does would double the memory of a loop that still
    holds its last loss.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
