"""A callback that watches the steps of Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from packprop.errors import BadInput, install
from packprop.integrations.between import StepBetween, caller_of, numbers_in
from packprop.monitor.logs import Values

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise BadInput(
        "packprop.integrations.transformers was imported.",
        "the package transformers",
        f"it cannot be imported: {error}",
        install("transformers"),
    ) from error


class MonitorCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]  # the library may be typed or not
    """``packprop.Monitor`` for ``Trainer``: ``Trainer(..., callbacks=[MonitorCallback(every=100)])``.

    A step of the optimizer is one step, with all its batches (``gradient_accumulation_steps``). The number that
    the trainer divides its loss by does not matter: see NOTE [Monitored step]
    (``packprop/monitor/measurements.py``).
    If a gradient scaler multiplies losses (``fp16=True``), the callback divides by its factor.

    Args:
        every: Steps from one monitored step to the next.
        prefix: The prefix of the names in the trainer's logs.
        trainer_log: Put numbers among the trainer's logs, in its next line with a loss.
        options: As in ``packprop.Monitor``: ``quantities``, ``log``, ``window``, ``ranks`` and so on.

    Raises:
        BadInput: In the first step, for arguments that ``Monitor`` refuses, and for ``fp16=True`` if the
            optimizer of the callbacks has no scaler, as under DeepSpeed.
    """

    def __init__(
        self, every: int | str = 100, *, prefix: str = "monitor/", trainer_log: bool = True, **options: Any
    ) -> None:
        self._prefix, self._waiting = prefix, dict[str, float]()
        self._between = StepBetween({"every": every, **options}, self._wait if trainer_log else None)

    @property
    def last(self) -> Values | None:
        """The values of the last monitored step; ``None`` before the first."""
        return None if self._between.monitor is None else self._between.monitor.last

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin to monitor a step."""
        scaler = getattr(optimizer, "scaler", None)  # accelerate's optimizer has the one that scales losses
        if scaler is None and getattr(args, "fp16", False):
            raise BadInput(
                "MonitorCallback was given to a Trainer.",
                f"fp16=True, with an optimizer of {type(optimizer).__name__}",
                "the factor on losses is not known: the optimizer has no gradient scaler",
                "use bf16=True, which needs no scaler, or a loop of your own with monitor.step(loss_scale=...)",
            )
        self._between.begin(
            model, state.global_step, scaler, run=state, owner=caller_of(TrainerCallback.__module__)
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the measured values."""
        self._between.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the model."""
        self._between.abandon()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add waiting numbers to the trainer's logs."""
        if logs is not None and "loss" in logs:
            logs.update(self._waiting)
            if state.log_history:
                state.log_history[-1].update(self._waiting)
            self._waiting = {}

    def _wait(self, values: Values, step: int) -> None:
        self._waiting = numbers_in(values, self._prefix)
