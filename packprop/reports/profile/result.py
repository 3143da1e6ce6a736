"""A profile as a value: it prints, saves and loads."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor

from packprop.reports.profile.files import check_folder, json_ready, layer_from, replace_file
from packprop.reports.profile.layers import Layer
from packprop.reports.profile.table import WIDTH, footer, profile_table


@dataclass(frozen=True)
class Profile:
    """What ``profile`` returns: prints as a table, converts to a dictionary, saves and loads.

    Args:
        layers: One row for each module that owns trainable parameters, in the model's order.
        total: One row for all parameters together.
        loss: The mean loss over the data set.
        samples: Number of samples.
        batches: Number of batches that they came in.
        settings: Model, loss function, device, precision, mode, seed, draws, versions.
        seconds: Wall time of the pass over the data.
        tensors: ``gradient/<parameter>`` and ``gradient_variance/<parameter>`` (of single samples'
            gradients) ``[*p]``; ``sample_gradient_norm/<layer>`` and ``sample_ggn_trace/<layer>``
            (exact, if it was computed) ``[n]``, of each sample's own loss; for each Kronecker
            factor ``kfac/<parameter>/A`` (or ``B``) ``[i, i]``, and ``kfac_eigenvalues/...`` of the
            same name ``[i]``, ascending.
    """

    layers: list[Layer]
    total: Layer
    loss: float
    samples: int
    batches: int
    settings: dict[str, Any]
    seconds: float
    tensors: dict[str, Tensor] = field(repr=False, compare=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tensors, as plain numbers, strings, lists and dictionaries."""
        plain = dataclasses.asdict(dataclasses.replace(self, tensors={}))
        del plain["tensors"]
        return plain

    def to_json(self) -> str:
        """``to_dict`` as text; ``null`` stands for what was not computed, is infinite or NaN."""
        return json.dumps(json_ready(self.to_dict()), indent=2, allow_nan=False) + "\n"

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write ``profile.json`` and ``profile.safetensors``, over older ones; return their paths.

        Raises:
            BadInput: If files cannot be written there.
        """
        check_folder(folder)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = target / "profile.json", target / "profile.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        replace_file(paths[0], self.to_json().encode())
        replace_file(paths[1], safetensors.torch.save(tensors))
        return paths

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read what ``save`` wrote."""
        saved = json.loads((Path(folder) / "profile.json").read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(Path(folder) / "profile.safetensors")
        layers = [layer_from(row) for row in saved["layers"]]
        return cls(**{**saved, "layers": layers, "total": layer_from(saved["total"])}, tensors=tensors)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield profile_table(self.layers, self.total, options.max_width)
        yield Text()
        yield from footer(self.settings, self.loss, self.samples, self.batches)
