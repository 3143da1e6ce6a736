"""Values over a whole data set, and how they are saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from packprop.tensors.nesting import tensors_in
from packprop.types import Extension

Value = Tensor | list[Tensor]


@dataclass
class Result(Mapping[Any, dict[str, Value]]):
    """Values by extension (or the name of the attribute that it saves) and by parameter name.

    Args:
        tables: ``savefield -> parameter name -> value``.
        samples: Samples that they were computed from.
        loss: The value of the loss over the whole data set.
        reduction: How the loss is reduced: ``"mean"`` or ``"sum"``.
    """

    tables: dict[str, dict[str, Value]]
    samples: int
    loss: float
    reduction: str = "mean"

    def __getitem__(self, key: Extension | str) -> dict[str, Value]:
        return self.tables[key if isinstance(key, str) else key.savefield]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def save(self, path: str | Path) -> None:
        """Write all tensors to one ``.safetensors`` file."""
        flat = {
            f"{savefield}/{name}/{index}": tensor.detach().contiguous().cpu()
            for savefield, by_name in self.tables.items()
            for name, value in by_name.items()
            for index, tensor in enumerate(tensors_in(value))
        }
        lists = [
            f"{savefield}/{name}"
            for savefield, by_name in self.tables.items()
            for name, value in by_name.items()
            if isinstance(value, list)
        ]
        notes = {
            "samples": str(self.samples),
            "loss": repr(self.loss),
            "reduction": self.reduction,
            "lists": "\n".join(lists),
        }
        safetensors.torch.save_file(flat, path, metadata=notes)

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what ``save`` wrote."""
        values: dict[str, dict[str, Value]] = {}
        with safetensors.safe_open(path, framework="pt") as file:
            notes = file.metadata()
            lists = set(notes["lists"].splitlines())
            for key in sorted(file.keys(), key=lambda key: (*key.split("/")[:2], int(key.split("/")[2]))):
                savefield, name, _ = key.split("/")
                by_name, tensor = values.setdefault(savefield, {}), file.get_tensor(key)
                if f"{savefield}/{name}" in lists:
                    pieces = by_name.setdefault(name, [])
                    assert isinstance(pieces, list)
                    pieces.append(tensor)
                else:
                    by_name[name] = tensor
        return cls(values, int(notes["samples"]), float(notes["loss"]), notes["reduction"])
