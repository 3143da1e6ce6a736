"""``packprop.compile``: a training step with its quantities, traced once for each kind of call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from packprop.applications.compiled.compiler import Backend
from packprop.applications.compiled.passes import ASKED, TrainingPass
from packprop.applications.compiled.replayer import Kind, Replayer
from packprop.engine.memory import Plan, budget_of
from packprop.engine.passes import Hook
from packprop.engine.tensors import LossFunction, require_loss, require_model
from packprop.errors import BadInput
from packprop.types import Extension, Extensions, check_extensions

ASKED_FOR = "packprop.compile(...) was called."


def compile(
    model: nn.Module,
    loss: LossFunction | None,
    *extensions: Extensions,
    extension_hook: Hook | None = None,
    backend: Backend = "inductor",
    mode: str | None = None,
    memory: int | str | Plan | None = None,
) -> CompiledStep:
    """Return a step that runs the model, the loss and ``backward()`` inside ``backpack(...)``, but faster.

    ``loss = step(inputs, targets)`` accumulates ``.grad``, saves every value under its ``savefield``, calls the
    hook, and returns the loss, cut from its graph. The model and the loss need not be extended.

    The first call of a kind is an ordinary pass, which refuses what ``backpack`` refuses. The second call also
    traces the pass, and the third compares a replay of the graph with it. From the fourth on, the graph takes
    the place of the pass. Calls are of one kind if their batches have equal shapes, and nothing else has
    changed that decides the work of a pass: which parameters require gradients, training or evaluation mode,
    attributes of modules, hooks, autocast (``docs/guide/compiled.md`` has the list). You may change values of
    parameters and buffers at will, and replace parameters.

    Args:
        model: Any module.
        loss: Called as ``loss(outputs, targets)``, a module or a function; ``None`` if the model returns its
            loss. Then a step takes one argument.
        extensions: Instances from ``packprop.extensions``, one by one or in a list; all but those whose values
            hold the graph.
        extension_hook: A function to call with each module that owns parameters. A replay calls it when all
            values are there.
        backend: ``"inductor"`` and other backends of ``torch.compile``; ``"eager"`` replays the traced graph
            without a compiler.
        mode: As in ``torch.compile``, such as ``"reduce-overhead"``.
        memory: As in ``backpack``: the graph belongs to a pass within this budget.

    Raises:
        BadInput: For a model that is no module, a loss that cannot be called, a class instead of an extension,
            an extension whose values hold the graph. In a call: without gradients enabled.
        PackpropError: In a call: what an ordinary pass refuses, and a model that asks for values of tensors in
            Python.
    """
    return CompiledStep(model, loss, extensions, extension_hook, backend, mode, memory)


class CompiledStep:
    """The step that ``packprop.compile`` returns; ``print(step)`` describes its traces."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        extensions: Sequence[Any],
        hook: Hook | None,
        backend: Backend,
        mode: str | None,
        memory: int | str | Plan | None,
    ) -> None:
        require_model(ASKED_FOR, model)
        require_loss(ASKED_FOR, loss)
        if hook is not None and (not callable(hook) or isinstance(hook, type)):
            where, instead = f"extension_hook of type {type(hook).__name__}", "give a function of one module"
            raise BadInput(ASKED_FOR, where, "it cannot be called", instead)
        chosen = check_extensions(ASKED_FOR, *extensions)
        _require_finished(chosen)
        budget = memory if isinstance(memory, Plan) else budget_of(memory)
        self._pass = TrainingPass(model, loss, chosen, hook, budget)
        self._backend = backend
        self._replayer = Replayer(self._pass, backend, mode)

    @property
    def graph(self) -> Graph | None:
        """The graph of the newest kind of calls that was traced; ``None`` if there is none yet."""
        graphs = [kind.traced.graph.graph for kind in self.kinds if kind.traced is not None]
        return graphs[-1] if graphs else None

    @property
    def kinds(self) -> list[Kind]:
        """The state of calls, one for each kind so far."""
        return self._replayer.kinds

    def __call__(self, inputs: Any, targets: Any = None) -> Tensor:
        """Run one step; return the loss ``[]``, cut from its graph.

        Args:
            inputs: The model's inputs: a tensor, a tuple or list of arguments, or a mapping by name.
            targets: The loss's arguments beside the outputs.
        """
        if not torch.is_grad_enabled():
            raise BadInput(
                ASKED,
                "torch.no_grad() or torch.inference_mode() around the call",
                "nothing is differentiated inside",
                "call the step outside; for the loss alone, call model and loss",
            )
        return self._replayer(inputs, targets)

    def __repr__(self) -> str:
        names = ", ".join(extension.name for extension in self._pass.extensions) or "the gradient alone"
        lines = [f"compiled step of {type(self._pass.model).__name__}: {names}; backend {self._backend!r}"]
        lines += [f"  {kind}" for kind in self.kinds]
        return "\n".join(lines if self.kinds else [*lines, "  not called yet"])


def _require_finished(extensions: Sequence[Extension]) -> None:
    """Refuse extensions whose values need the graph of the pass after it.

    Raises:
        BadInput: With the first such extension.
    """
    for extension in extensions:
        if extension.keeps_graph:
            raise BadInput(
                ASKED_FOR,
                f"extension {extension.name}",
                "its values are functions that hold the graph of a forward pass, and a replay has none",
                "use `with packprop.backpack(...)` around loss.backward(), or packprop.products",
            )
