"""Quantities over a whole data set: batches are streamed, and their unscaled results are merged."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from packprop.algebra.monoid import SINGLE
from packprop.context import check_extensions
from packprop.dataset.batch_pass import BatchPass
from packprop.dataset.batches import Batches, Data, described
from packprop.dataset.checkpoint import Checkpoint, Every
from packprop.dataset.chunks import ChunkSizesByBatch
from packprop.dataset.identity import identity_of
from packprop.dataset.parts import needs_second_reading
from packprop.dataset.result import Result
from packprop.dataset.run import Run
from packprop.dataset.state import MergedResults
from packprop.dataset.stored import stored_results
from packprop.dataset.stream import BatchStream
from packprop.engine.backward_pass import long_work_of
from packprop.errors import BadInput
from packprop.memory.planning import chunk_sizes_over_data
from packprop.recording.switch import extended
from packprop.store.writing import StoreWriter
from packprop.tensors.calling import LossFunction
from packprop.types import Extension

ASKED = "compute(...) was called."


def compute(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data | Batches,
    extensions: Sequence[Extension],
    *,
    batch_size: int | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    checkpoint: str | Path | None = None,
    every: int | str = "30s",
    store: StoreWriter | str | Path | None = None,
    compiled: bool = True,
) -> Result:
    """The quantities of ``extensions`` for the loss over a whole data set, batch by batch.

    The values are those of one loss over all samples: under a mean loss the scale is 1 over the number
    of all terms, whatever the sizes of the batches; under a sum it is 1. ``.grad`` is left alone and
    gradients of weights are not computed.

    Args:
        model: The model, in the mode (train or eval) that it shall be used in; need not be
            extended.
        loss: ``loss(model(inputs), targets)``, a loss module or function of torch that reduces by
            mean or sum. ``None`` where the model computes such a loss itself, from the whole batch, and
            returns it: as entry or attribute ``loss``, first in a tuple, or alone.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``; inputs of a batch may be a tuple
            or a mapping of arguments. A batch may also be one mapping, as Hugging Face's loaders give it:
            its ``labels`` are the targets, the rest goes into the model by name. Without ``loss`` all of a
            batch goes into the model: a tensor, a tuple or a mapping of arguments.
        extensions: What to compute.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        progress: Show a progress bar on standard error.
        device: Where batches are moved to; by default where the model's parameters are.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), with
            parameters, activations of a batch and results. A plan is made for the first batch, and again for
            each batch that is larger than those before.
        checkpoint: A folder that the run is kept in, made if it is missing. A run that was ended, by whatever
            means, goes on from there when ``compute`` is called again with the same arguments, and ends with
            the same values. A folder of a run that came to its end gives its values at once. Batches that come
            as they are, from a loader without ``state_dict``, are read again up to that place, and compared.
        every: How often the checkpoint is written: a time (``"30s"``, ``"5min"``, ``"1h"``) or a number of
            batches. By the clock, writing takes at most a fiftieth of the time.
        store: Where values of single samples go as they come, instead of into the result: a folder, which is
            made, or a ``StoreWriter``, which is left open. Rows there are those of the loss summed over its
            terms.
        compiled: Whether graphs may take the place of passes where that pays (``packprop.compile``): in small
            models, from a hundred batches of one shape on. The last digits may then differ from run to run, so
            not with a checkpoint; nor with a budget of memory. What it brought is told in ``Result.replays``.

    Raises:
        BadInput: For extensions that need all samples in one batch, or read the data twice where these can be
            read once; no data, or no loss; a checkpoint of something else, or a folder that is in use or holds
            other files; for a store that nothing would go to, or that cannot be written.
        PackpropError: For a loss whose number of terms is not known, a parameter that some batches do not use,
            or a checkpoint that cannot be read.
    """
    chosen = check_extensions(ASKED, list(extensions))
    _require_mergeable(chosen)
    batches = data if isinstance(data, Batches) else Batches(ASKED, data, batch_size, whole=loss is None)
    _require_rereadable(chosen, batches, data)
    place = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    chunk_sizes = ChunkSizesByBatch(
        lambda batch: chunk_sizes_over_data(model, loss, batch, chosen, memory, place)
    )
    stored = stored_results(ASKED, store, model, chosen)
    if checkpoint is not None and stored is not None:
        raise BadInput(
            ASKED,
            f"checkpoint={str(checkpoint)!r} with store={str(stored.writer.folder)!r}",
            "rows that were stored since the last checkpoint would be stored once more",
            "leave one of the two out",
        )
    results = MergedResults([each for each in chosen if stored is None or each not in stored.extensions])
    kept = None
    if checkpoint is not None:
        options = {"data": batches.source.facts(), "memory": memory}
        kept = Checkpoint(checkpoint, Every(every), identity_of(model, loss, chosen, **options))
    own = stored.writer if stored is not None and stored.writer is not store else contextlib.nullcontext()
    step = BatchPass(ASKED, model, loss, results, chosen, stored)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.nullcontext() if kept is None else kept.open())
        stack.enter_context(own)
        for module in step.modules:
            stack.enter_context(extended(module))
        replays = compiled and checkpoint is None and memory is None
        stream = BatchStream(step, place, batches.left if replays else None)
        run = Run(batches, stream, chunk_sizes, place, kept, progress)
        with long_work_of(chosen, bar=False):
            run.go_on()
            run.to_the_end()
    result = results.result()
    result.replays = stream.told()
    return result


def _require_mergeable(extensions: Sequence[Extension]) -> None:
    """Refuse extensions whose values over batches cannot be merged.

    Raises:
        BadInput: With the first of them.
    """
    for extension in extensions:
        if any(row.over_n is SINGLE for row in extension.rows):
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "its value is a function that belongs to the graph of one backward pass",
                "ask for it in a backward pass of its own, inside `with packprop.backpack(...)`",
            )
        if any(row.whole for row in extension.rows) or extension.subsampling is not None:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "it relates samples of one batch to each other or by their index in it",
                "use it in `with backpack(...)` on one batch",
            )
    fields = [extension.savefield for extension in extensions]
    for extension in extensions:
        if fields.count(extension.savefield) > 1:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                f"another one that is saved as {extension.savefield!r} is there, too",
                "compute one after the other",
            )


def _require_rereadable(extensions: Sequence[Extension], batches: Batches, data: object) -> None:
    """Refuse what goes over the samples twice, if the data are gone when they have been read.

    Raises:
        BadInput: With the first such extension.
    """
    twice = [extension for extension in extensions if needs_second_reading(extension)]
    if twice and batches.is_read_once:
        raise BadInput(
            ASKED,
            f"extension {twice[0].name}, with data {described(data)}",
            "it goes over the samples twice, and these data can be read once",
            "give a list of batches, a data loader, a Dataset or a pair of tensors; or ask for KFAC or KFLR",
        )
