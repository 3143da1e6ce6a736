"""A monitored step for trainers that announce its beginning and end, but run it themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from packprop.monitor.logs import Values
from packprop.monitor.monitor import Monitor
from packprop.monitor.step import MonitoredStep


class _Opened(threading.local):
    between: StepBetween | None = None


_opened = _Opened()
"""The owner of the open step in this thread."""


class StepBetween:
    """Monitors the steps of a trainer that calls ``begin`` and ``end``.

    A trainer does not announce that a step has failed. So packprop monitors no backward pass after one that has
    failed, or after the function that runs the step has ended. When the next trainer begins a step, packprop
    forgets the failed step, and restores its model.

    Args:
        options: Arguments of ``Monitor``. The model comes with the first step; another model gets a monitor of
            its own.
        trainer: A function that takes the values of a monitored step and its number: the trainer's own
            logger. ``None`` without one.
    """

    def __init__(self, options: Mapping[str, Any], trainer: Callable[[Values, int], None] | None) -> None:
        self._options, self._trainer = dict(options), trainer
        self._step: MonitoredStep | None = None
        self._run: object = None
        self.monitor: Monitor | None = None
        self._model: nn.Module | None = None

    def begin(
        self,
        model: nn.Module,
        number: int,
        scaler: Any = None,
        *,
        run: object = None,
        owner: FrameType | None = None,
    ) -> None:
        """Begin a step, and monitor it if it is due.

        Args:
            model: The model that is trained.
            number: The number of the step.
            scaler: The gradient scaler that multiplies losses, if there is one; only monitored steps read it.
            run: An object that the trainer makes for each run. ``begin`` abandons a step that another run has
                left open.
            owner: The Python frame that runs the step, if that is known.

        Raises:
            BadInput: For arguments that ``Monitor`` refuses.
        """
        if self.monitor is None or self._model is not model:
            log = self._options.get("log")
            logs = [*log] if isinstance(log, Sequence) and not isinstance(log, str) else [log]
            known = [each for each in (*logs, self._trainer) if each is not None]
            self.monitor, self._model = Monitor(model, **self._options | {"log": known}), model
        self.abandon()
        left = _opened.between
        if left is not None and left._run is not run:
            left.abandon()
        if self.monitor.is_due(number):
            self._step = self.monitor.begin(number, 1.0 if scaler is None else scaler.get_scale())
            self._step.open(gives_up=True, owner=owner)
            _opened.between, self._run = self, run

    def end(self) -> None:
        """Pass on the measured values."""
        step = self._closed()
        if step is not None:
            step.finish()

    def abandon(self) -> None:
        """Restore the model; forget a step that has not ended."""
        self._closed()

    def _closed(self) -> MonitoredStep | None:
        step, self._step = self._step, None
        if step is not None:
            step.close()
            self._run = None
            if _opened.between is self:
                _opened.between = None
        return step


def caller_of(module: str) -> FrameType | None:
    """Return the Python frame that called into a module on the way to this call; ``None`` if none did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") == module:
        frame = frame.f_back
    return frame


def numbers_in(values: Values, prefix: str) -> dict[str, float]:
    """Return the values that are numbers, for a logger, with a prefix before each name."""
    return {f"{prefix}{name}": value for name, value in values.items() if isinstance(value, (int, float))}
