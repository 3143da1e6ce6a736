"""Values over a whole data set, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from packprop.applications.dataset.summary import as_frame, as_html, as_text
from packprop.applications.dataset.values import decode, encode
from packprop.engine.algebra import Eigen
from packprop.engine.passes import ChunkSizes
from packprop.engine.tensors import (
    accumulation_dtype,
    as_matrix,
    is_distributed,
    map_tensors,
    tensors_in,
    whole_tensor,
)
from packprop.errors import Absent, BadInput
from packprop.store.checksums import checksum_of_tensor
from packprop.store.files import written_whole
from packprop.store.schema import Unfit, checksum_of, fitted, parsed
from packprop.types import Extension

Value = Tensor | list[Tensor] | Eigen

FORMAT = "values over a data set, format 3"
"""The name of the format of a file."""


@dataclass(repr=False)
class Result(Mapping[Any, dict[str, Any]]):
    """Values by extension (or the name of the attribute that it saves) and by parameter name.

    It prints as its ``summary()``; a notebook shows the same table.

    Args:
        tables: ``savefield -> parameter name -> value``.
        samples: The number of samples.
        loss: The value of the loss over the whole data set.
        reduction: The reduction of the loss: ``"mean"`` or ``"sum"``.
        replays: The effect of replayed graphs, in words; ``None`` without any; not saved.
        chunk_sizes: The chunk sizes of the first batch, if one was read; not saved.
    """

    tables: dict[str, dict[str, Any]]
    samples: int
    loss: float
    reduction: str = "mean"
    replays: str | None = None
    chunk_sizes: ChunkSizes | None = None

    def __getitem__(self, key: Extension | str) -> dict[str, Any]:
        name = key if isinstance(key, str) else key.savefield
        if name not in self.tables:
            held = ", ".join(map(repr, self.tables)) or "nothing"
            why, instead = f"it has {held}", "compute it, or take one of these"
            raise Absent(f"result[{name!r}] was asked for.", "the result", why, instead)
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        held = ", ".join(f"{name!r}: {len(by_name)} parameters" for name, by_name in self.tables.items())
        return f"Result({{{held}}}, samples={self.samples}, loss={self.loss!r}, reduction={self.reduction!r})"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return a table of all tensors: shape, norm, mean, smallest and largest entry of each.

        Each Kronecker factor has a line, and so do the eigenvalues of an eigendecomposition. For sharded values
        it shows this rank's part; ``whole().summary()`` shows all.
        """
        return as_text(self.tables, self._facts)

    def to_frame(self) -> Any:
        """Return the lines of ``summary()`` as a data frame of pandas, by quantity, parameter and part.

        Raises:
            BadInput: If pandas is missing: ``pip install '.[frames]'``.
        """
        return as_frame("A data frame of a result was asked for.", self.tables)

    def _repr_html_(self) -> str:
        return as_html(self.tables, self._facts)

    def norms(self) -> Tensor:
        """Return norms of the gradients of samples' own losses, in all parameters together ``[n]``.

        A sample's own loss is N times its part of a mean loss, or its part of a sum, as in
        ``clipped_gradients`` and in profiles.

        Raises:
            BadInput: If neither norms (``BatchL2Grad``) nor gradients of samples are among the values.
        """
        scale = self.samples if self.reduction == "mean" else 1
        squares = [*self.tables.get("batch_l2", {}).values()]
        rows = () if squares else self.tables.get("grad_batch", {}).values()
        wide = [as_matrix(each.to(accumulation_dtype(each.dtype))) for each in rows]
        squares += [each.abs().square().sum(1) for each in wide]
        if squares:
            return scale * torch.stack([each.to(squares[0].device) for each in squares]).sum(0).sqrt()
        raise BadInput(
            "Result.norms() was called.",
            f"values {', '.join(self.tables) or 'of no extension'}",
            "norms of single samples are not among them",
            "ask for them: compute(model, loss, data, BatchL2Grad())",
        )

    @property
    def _facts(self) -> str:
        parts = ", sharded values: this rank's part" if self.is_sharded else ""
        return f"{self.samples:,} samples, {self.reduction} loss {self.loss:.6g}{parts}"

    @property
    def is_sharded(self) -> bool:
        """Tell whether some values are of type ``DTensor``, of which this process holds a part."""
        return any(map(is_distributed, tensors_in(self.tables)))

    def whole(self) -> Result:
        """Return the same result with whole tensors in place of each ``DTensor``; all ranks must call it."""
        return replace(self, tables=map_tensors(whole_tensor, self.tables)) if self.is_sharded else self

    def save(self, path: str | Path) -> None:
        """Write all tensors to one ``.safetensors`` file; one that exists is replaced in one step.

        Raises:
            BadInput: If some tensors are sharded: call ``whole()`` on all ranks before.
        """
        if self.is_sharded:
            raise BadInput(
                "Result.save(...) was called.",
                "values of parameters that fully_shard (FSDP2) has sharded",
                "this process holds a part of them",
                "call result.whole() on all ranks, and save what it returns on one; or give the tables to "
                "torch.distributed.checkpoint, which writes each rank's part",
            )
        tensors: list[Tensor] = []
        notes = {
            "format": FORMAT,
            "samples": str(self.samples),
            "loss": repr(self.loss),
            "reduction": self.reduction,
            "values": json.dumps(encode(self.tables, tensors)),
        }
        names = _names_of(self.tables)
        flat = {name: tensor.cpu().contiguous().clone() for name, tensor in zip(names, tensors, strict=True)}
        notes["names"] = json.dumps(names)
        notes["checksum"] = str(_checksum(notes, flat.values()))
        with written_whole(Path(path).resolve()) as part:  # of a link, where it leads
            safetensors.torch.save_file(flat, part, metadata=notes)

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what ``save`` wrote.

        Raises:
            BadInput: If the file is missing, is of another kind, or has changed.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                if found.get("format") != FORMAT:
                    raise Unfit(f"it is not {FORMAT}, or was written by another version of packprop")
                notes: _Notes = fitted(_Notes, found)
                # copies: the file is mapped, and others may write to it, or shorten it, later
                tensors = [file.get_tensor(name).clone() for name in fitted(list[str], parsed(notes.names))]
            known = {name: text for name, text in found.items() if name != "checksum"}
            if notes.checksum != str(_checksum(known, tensors)):
                raise Unfit("its checksum does not match: it has changed since it was written")
            tables = fitted(dict[str, dict[str, Any]], decode(parsed(notes.values), tensors))
            return cls(tables, int(notes.samples), float(notes.loss), notes.reduction)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise BadInput(
                "Result.load(...) was called.",
                f"the file {str(path)!r}",
                f"it cannot be read ({error})",
                "give a file that Result.save has written",
            ) from error


@dataclass(frozen=True)
class _Notes:
    """The metadata of a file, beside its tensors."""

    format: str
    samples: str
    loss: str
    reduction: Literal["mean", "sum"]
    values: str
    names: str
    checksum: str


def _checksum(notes: Mapping[str, str], tensors: Iterable[Tensor]) -> int:
    """Return the checksum of the whole content of a file."""
    kinds = [[str(each.dtype), [*each.shape], checksum_of_tensor(each)] for each in tensors]
    return checksum_of([dict(notes), kinds])


def _names_of(tables: dict[str, dict[str, Value]]) -> list[str]:
    """Return a name for each tensor, in the order in which ``encode`` takes them."""
    names: list[str] = []
    for savefield, by_name in tables.items():
        for name, value in by_name.items():
            tensors: list[Tensor] = []
            encode(value, tensors)
            names += [f"{savefield}/{name}/{index}" for index in range(len(tensors))]
    return names
