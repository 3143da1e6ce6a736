"""The callback for Lightning's ``Trainer``, on a module that knows nothing of packprop."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")


def trained(folder: Path, callbacks: list[Any], **options: Any) -> tuple[nn.Module, Any]:
    """A module after some steps, and what its logger was told."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.layers(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 5), torch.randint(3, (32,)))
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Classifier()
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, **quiet, **options
        )
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(data, batch_size=4))
    return module, logger


@pytest.mark.parametrize("batches", [1, 2])
def test_a_script_that_is_not_changed(batches: int, tmp_path: Path) -> None:
    from packprop.integrations.lightning import MonitorCallback

    seen: list[tuple[dict[str, Any], int]] = []
    callback = MonitorCallback(every=2, log=lambda values, step: seen.append((values, step)))
    options = {"accumulate_grad_batches": batches}
    plain, _ = trained(tmp_path / "a", [], **options)
    watched, logger = trained(tmp_path / "b", [callback], **options)
    for mine, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [step for _, step in seen] == list(range(0, 8 // batches, 2))
    assert all(values["samples"] == 4 * batches and values["update_ratio"] > 0 for values, _ in seen)
    written = (Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8")
    assert "monitor/noise_scale" in written
    assert callback.last == seen[-1][0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())


def test_losses_that_a_scaler_scales(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from packprop.integrations.lightning import MonitorCallback

    class Scaled(MixedPrecision):
        """The scaler of mixed precision, without its half-precision forward pass."""

        def forward_context(self) -> Any:
            return contextlib.nullcontext()

    seen: list[list[dict[str, Any]]] = [[], []]
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    for values, plugins in zip(seen, ([], [Scaled("16-mixed", "cpu", scaler)]), strict=True):
        callback = MonitorCallback(every=2, log=lambda found, _, values=values: values.append(found))
        trained(tmp_path, [callback], plugins=plugins)
    assert len(seen[0]) == len(seen[1]) == 4
    assert scaler.get_scale() > 1024
    for plain, scaled in zip(*seen, strict=True):
        for name, value in plain.items():
            if isinstance(value, float):
                assert scaled[name] == pytest.approx(value, rel=1e-3), name


def test_the_first_step_of_a_run_after_one_that_failed_in_its_first(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from packprop.integrations.lightning import MonitorCallback

    class Failing(pl.Callback):
        def on_before_zero_grad(self, *given: Any) -> None:
            raise OSError("the disk is gone")

    callback = MonitorCallback(every=100)
    with pytest.raises(OSError, match="gone"):
        trained(tmp_path, [callback, Failing()])
    assert callback.last is None
    trained(tmp_path, [callback])
    assert callback.last is not None
