"""A callback that watches the steps of Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

from packprop.errors import BadInput, install
from packprop.integrations.between import StepBetween, numbers_in
from packprop.monitor.logs import Values

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise BadInput(
        "packprop.integrations.lightning was imported.",
        "the package lightning",
        f"it cannot be imported: {error}",
        install("lightning"),
    ) from error


class MonitorCallback(Callback):  # type: ignore[misc,unused-ignore]  # the library may be typed or not
    """``packprop.Monitor`` for Lightning: ``Trainer(..., callbacks=[MonitorCallback(every=100)])``.

    A step of the optimizer is one step, with all its batches (``accumulate_grad_batches``). If a gradient
    scaler multiplies losses, the callback divides by its factor.

    Args:
        every: Steps from one monitored step to the next.
        prefix: The prefix of the names in the trainer's logs.
        trainer_log: Send numbers to the trainer's loggers.
        options: As in ``packprop.Monitor``: ``quantities``, ``log``, ``window``, ``ranks`` and so on.

    Raises:
        BadInput: In the first step, for arguments that ``Monitor`` refuses.
    """

    def __init__(
        self, every: int | str = 100, *, prefix: str = "monitor/", trainer_log: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self._prefix, self._trainer, self._number = prefix, None, -1
        self._between = StepBetween({"every": every, **options}, self._tell if trainer_log else None)

    @property
    def last(self) -> Values | None:
        """The values of the last monitored step; ``None`` before the first."""
        return None if self._between.monitor is None else self._between.monitor.last

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the number of the last step, which may have failed: a run may begin with the same number."""
        self._number = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to monitor a step at its first batch."""
        if self._number != trainer.global_step:
            self._number, self._trainer = trainer.global_step, trainer
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._between.begin(pl_module, trainer.global_step, scaler, run=trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on the measured values after the last batch of a step."""
        if trainer.global_step != self._number:
            self._between.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the model."""
        self._between.abandon()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the model."""
        self._between.abandon()

    def _tell(self, values: Values, step: int) -> None:
        for logger in getattr(self._trainer, "loggers", []):
            logger.log_metrics(numbers_in(values, self._prefix), step)
