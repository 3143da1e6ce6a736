"""The callback for Hugging Face's ``Trainer``, on a script that knows nothing of packprop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packprop.errors import BadInput

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trained(folder: Path, callbacks: list[Any], scaler: Any = None, **options: Any) -> Any:
    """A trainer after six steps of a language model that is made from a configuration."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(20, (48, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.accelerator.scaler = scaler  # as under fp16, which accelerate has on accelerators alone
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_a_script_that_is_not_changed(options: dict[str, Any], tmp_path: Path) -> None:
    from packprop.integrations.transformers import MonitorCallback

    seen: list[tuple[dict[str, Any], int]] = []
    callback = MonitorCallback(every=2, log=lambda values, step: seen.append((values, step)))
    plain, watched = trained(tmp_path / "a", [], **options), trained(tmp_path / "b", [callback], **options)
    for mine, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [step for _, step in seen] == [0, 2, 4]
    batches = options.get("gradient_accumulation_steps", 1)
    assert all(values["samples"] == 4 * batches for values, _ in seen)
    lines = {entry["step"]: entry for entry in watched.state.log_history if "loss" in entry}
    for values, step in seen:
        entry = lines[step + 1]  # the trainer counts steps that are done
        assert entry["monitor/gradient_norm"] == pytest.approx(values["gradient_norm"])
        if not options.get("bf16"):
            assert values["gradient_norm"] == pytest.approx(entry["grad_norm"], rel=1e-4)
        assert values["update_ratio"] > 0
    assert callback.last == seen[-1][0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())


def test_losses_that_a_scaler_scales(tmp_path: Path) -> None:
    from packprop.integrations.transformers import MonitorCallback

    seen: list[list[dict[str, Any]]] = [[], []]
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    for values, own in zip(seen, (None, scaler), strict=True):
        callback = MonitorCallback(every=2, log=lambda found, _, values=values: values.append(found))
        # without clipping, for which accelerate takes the scale off under its own mixed precision alone, and by
        # plain descent, which does not divide by rounding errors
        trained(tmp_path, [callback], own, max_grad_norm=0.0, optim="sgd")
    assert len(seen[0]) == len(seen[1]) == 3
    assert scaler.get_scale() > 1024  # so that later steps have another factor
    for plain, scaled in zip(*seen, strict=True):
        for name in (
            "gradient_norm",
            "noise_scale_low",
            "signal_to_noise",
            "sample_norm_median",
            "update_ratio",
        ):
            assert scaled[name] == pytest.approx(plain[name], rel=1e-3), name


def test_a_scaler_that_is_not_to_be_found(tmp_path: Path) -> None:
    from packprop.integrations.transformers import MonitorCallback

    arguments = type("Arguments", (), {"fp16": True})()
    with pytest.raises(BadInput, match="the optimizer has no gradient scaler"):
        MonitorCallback().on_step_begin(arguments, None, None)
    with pytest.raises(BadInput, match="every=0"):
        trained(tmp_path, [MonitorCallback(every=0)])


def test_a_step_that_fails_before_its_backward_pass_leaves_later_passes_plain(tmp_path: Path) -> None:
    from packprop.integrations.transformers import MonitorCallback

    class Fails(transformers.TrainerCallback):  # type: ignore[misc,name-defined,unused-ignore]  # imported if there
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise MemoryError

    with pytest.raises(MemoryError):
        trained(tmp_path, [MonitorCallback(every=1), Fails()])
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
    )  # a watched pass would be refused
    model(torch.randn(5, 3)).square().mean().backward()
