"""Values of single samples that go to a store as they come, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.parts import Part
from packprop.engine.algebra import nothing_like, rescale
from packprop.engine.tensors import accumulation_dtype
from packprop.errors import BadInput
from packprop.store.describing import described_extension, grows
from packprop.store.values import put
from packprop.store.writing import StoreWriter
from packprop.types import Extension

LOSS = "loss"
"""The name of stored losses of samples."""


class StoredResults:
    """Takes the results of a batch for the store, and stores them together when the batch is done.

    If a batch does not use a parameter, its rows of that parameter are zero.

    Args:
        writer: The writer of the store.
        extensions: All extensions.
        losses: Also store the loss of each sample.

    Attributes:
        indices: Returns the indices of a batch's samples in the data, by its number; ``None`` to count samples.
    """

    def __init__(self, writer: StoreWriter, extensions: Sequence[Extension], losses: bool = False) -> None:
        self.writer, self.losses = writer, losses
        stored = [described_extension(extension) for extension in writer.extensions]
        self.extensions = [extension for extension in extensions if described_extension(extension) in stored]
        self._values: dict[tuple[str, str], Tensor] = {}
        self.indices: Callable[[int], range] | None = None

    def take(
        self, name: str, dtype: torch.dtype, samples: int, terms: float, results: dict[Part, list[Any]]
    ) -> dict[Part, list[Any]]:
        """Keep the results of one parameter for the store, and return the others.

        As in ``MergedResults``, kept results have the scale of a loss that is summed over its terms.

        Raises:
            BadInput: For numbers too large for the stored precision.
        """
        for part, found in results.items():
            extension = part.whole
            if extension in self.extensions:
                value = of_summed_loss(extension, found, dtype, samples, terms)
                put(self._values, extension, name, value, self.writer.dtype or extension.dtype_of(dtype))
        return {part: values for part, values in results.items() if part.whole not in self.extensions}

    def take_losses(self, losses: Tensor) -> None:
        """Keep the loss of each sample of a batch."""
        self._values[LOSS, ""] = losses

    @property
    def place(self) -> tuple[int, float]:
        """Return the number of stored samples, and the number of terms of their losses."""
        return self.writer.samples, self.writer.terms

    def go_to(self, place: Sequence[Any]) -> None:
        """Go back to a place, and remove later rows.

        Args:
            place: Samples, terms, and the checksum that the writer had then.

        Raises:
            BadInput: If fewer samples are safely stored, or the store is another one.
        """
        self._values = {}
        self.writer.resume_at(*place)

    def end_batch(self, batch: Any, number: int, samples: int, terms: float) -> None:
        """Store the kept results of a batch, given its number among those of all ranks."""
        values, self._values = self._values, {}
        identifiers = self._identified(batch)
        if identifiers is None and self.indices is not None and len(indices := self.indices(number)) == samples:
            identifiers = indices
        self.writer.add(values, samples, terms, identifiers)

    def _identified(self, batch: Any) -> Any:
        """Return the identifiers of a batch's samples; ``None`` to number them.

        Raises:
            BadInput: If the user's function fails.
        """
        identify = self.writer.identify
        try:
            return None if identify is None else identify(batch)
        except Exception as error:
            raise BadInput(
                "A store was written.",
                f"StoreWriter(identify=...), with a batch of type {type(batch).__name__}",
                f"{type(error).__name__}: {error}",
                "let it map a batch, as the data yield it, to whole numbers [n]",
            ) from error


def of_summed_loss(
    extension: Extension, found: Sequence[Any], dtype: torch.dtype, samples: int, terms: float
) -> Tensor:
    """Return the value for a loss summed over its terms, from results for a loss divided by ``terms``.

    It has the precision of sums: it may not fit into that of the parameter.

    Args:
        extension: The extension of the value.
        found: A result for each of its rows.
        dtype: Precision of the parameter.
        samples: Samples of the batch.
        terms: The divisor of its loss; 0 for a batch without terms, which adds nothing.
    """
    values = [
        rescale(value if terms or not row.degree else nothing_like(value), terms, row.degree)
        for row, value in zip(extension.rows, found, strict=True)
    ]
    finished: Tensor = extension.finish(values, samples)
    return finished.to(accumulation_dtype(extension.dtype_of(dtype)))


def stored_results(
    asked: str,
    store: StoreWriter | str | Path | None,
    model: nn.Module,
    extensions: Sequence[Extension],
    resume: bool = False,
    losses: bool = False,
) -> StoredResults | None:
    """Return what takes results for a store, an open one or one in a new folder; ``None`` without a store.

    ``resume`` continues a store in that folder. ``losses`` also stores losses of samples.

    Raises:
        BadInput: If no extension grows with the data, the store was opened for other extensions, or there is no
            store for the losses, or one that holds samples with other ``losses``.
    """
    if store is None:
        if losses:
            raise BadInput(
                asked,
                "losses=True without a store",
                "losses of single samples go to a store, not into the result",
                "give store='folder', or leave losses out",
            )
        return None
    if not isinstance(store, StoreWriter):
        growing = [extension for extension in extensions if grows(extension)]
        if not growing and not losses:
            names = ", ".join(extension.name for extension in extensions)
            raise BadInput(
                asked,
                f"store={str(store)!r} with {names}",
                "none of these values grows with the data: there is nothing to store",
                "leave the store out, or ask for BatchGrad, BatchL2Grad or another value of single samples",
            )
        store = StoreWriter(store, model, growing, resume=resume)
    store.require_model(asked, model)
    found = StoredResults(store, extensions, losses)
    if len(found.extensions) != len(store.extensions):
        known = [described_extension(extension) for extension in extensions]
        missing = next(each for each in store.extensions if described_extension(each) not in known)
        raise BadInput(
            asked,
            f"the store {str(store.folder)!r}",
            f"it was opened for {missing.name}, which this call does not compute",
            "give compute(...) the extensions of the store, with the same options",
        )
    if store.samples and losses != (LOSS in store.quantities):
        raise BadInput(
            asked,
            f"the store {str(store.folder)!r}, which holds {store.samples} samples",
            f"it holds {'no ' if losses else ''}losses of samples, and losses={losses} was asked for",
            f"continue with losses={not losses}, or write to another folder",
        )
    return found
