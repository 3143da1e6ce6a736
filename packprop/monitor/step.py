"""One step of a training loop, which the monitor watches if its turn has come."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.context import innermost
from packprop.engine.recording import Walks, extended, record
from packprop.engine.tensors import named_parameters
from packprop.errors import BadInput, PackpropWarning
from packprop.monitor.identifiers import names_of
from packprop.monitor.measurements import StepValues, measured
from packprop.monitor.passes import MonitoredPass

NOTHING_SEEN = (
    "Monitor: no backward pass through the model was seen inside `with monitor.step():`, so nothing is logged "
    "for this step. The backward pass ran outside, inside its own `backpack(...)`, or not at all. Instead: put "
    "the forward pass and loss.backward() inside."
)
NO_UPDATE = (
    "Monitor: 'update_ratio' was asked for, but no parameter changed inside `with monitor.step():`, so it is "
    "left out. The optimizer's step comes later, or was skipped (a gradient scaler skips steps with gradients "
    "that are not finite). Instead: put optimizer.step() inside."
)

ASKED = "`with monitor.step():` was entered."
IDENTIFIED = "monitor.step(identifiers=...) or step.identify(...) was called."


class Step:
    """A step that is not monitored: it does nothing. ``monitored`` is true for the others."""

    monitored = False

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing to end."""

    def identify(self, identifiers: Iterable[Any]) -> None:
        """Name the next samples: one identifier for each, in the order of the batch."""


UNWATCHED = Step()
"""The step that ``monitor.step()`` returns if it does not monitor."""


class MonitoredStep(Step):
    """A step that is monitored.

    Put ``with`` around all of it. If you cannot, call ``open`` and ``close`` in turns, around each of its
    backward passes, and ``finish`` at the end.

    Args:
        model: The model to measure.
        number: The number of the step.
        watch: The watch over its passes.
        updates: Measure the optimizer's update.
        done: A function to call at the end with the step and its values.
        told: Warnings of earlier steps, which this one does not repeat.
        walks: What passes of earlier steps have left for later ones; see ``extended``.
    """

    monitored = True

    def __init__(
        self,
        model: nn.Module,
        number: int,
        watch: MonitoredPass,
        *,
        updates: bool,
        done: Callable[[MonitoredStep, StepValues], None],
        told: set[str],
        walks: Walks,
    ) -> None:
        self.number, self.identifiers = number, list[Any]()
        self.is_open = False
        self._model, self._done, self._updates, self._told = model, done, updates, told
        self._pass, self._contexts, self._walks = watch, contextlib.ExitStack(), walks
        self._before: dict[str, Tensor] | None = None

    def identify(self, identifiers: Iterable[Any]) -> None:
        """Name the next samples: one identifier for each, in the order of the batch."""
        self.identifiers += names_of(IDENTIFIED, identifiers)

    def open(self, gives_up: bool = False, owner: FrameType | None = None) -> None:
        """Begin to watch.

        Args:
            gives_up: Watch no pass after one that has failed.
            owner: The Python frame that runs the step: watch no pass after it has been left.
        """
        around = innermost()
        if around is not None and not (isinstance(around, MonitoredPass) and around.given_up):
            raise BadInput(
                ASKED,
                "a `with backpack(...)` that is around it",
                "of two contexts, the inner one takes over the backward pass, so backpack would save nothing",
                "use `with backpack(...)` in steps that are not monitored: `if not step.monitored`",
            )
        self._pass.gives_up, self._pass.owner = gives_up, owner
        if self._updates and self._before is None:
            self._before = {name: p.detach().clone() for name, p in self._trainable()}
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(extended(self._model, walks=self._walks))
            contexts.enter_context(self._pass)
            contexts.enter_context(record())
            self._contexts = contexts.pop_all()
        self.is_open = True

    def close(self) -> None:
        """Stop watching; restore the model as it was before ``open``."""
        self.is_open = False
        self._contexts.close()

    def finish(self) -> None:
        """Pass on the measured values."""
        passes = self._pass.brought
        if not passes:
            warnings.warn(NOTHING_SEEN, PackpropWarning, stacklevel=3)
            return
        updates = self._updated()
        if self._updates and not updates and NO_UPDATE not in self._told:
            self._told.add(NO_UPDATE)
            warnings.warn(NO_UPDATE, PackpropWarning, stacklevel=3)
        self._done(self, measured(passes, self._pass.gradients, updates))

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in named_parameters(self._model) if p.requires_grad]

    def _updated(self) -> dict[str, tuple[float, float]]:
        """Return squared norms of each parameter's update and of itself; nothing if none has changed."""
        before = self._before or {}
        squares = {
            name: (
                float((p.detach() - before[name]).double().square().sum()),
                float(before[name].double().square().sum()),
            )
            for name, p in self._trainable()
            if name in before
        }
        return squares if any(update > 0 for update, _ in squares.values()) else {}

    def __enter__(self) -> MonitoredStep:
        self.open()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        if error[0] is None:
            with torch.no_grad():
                self.finish()
