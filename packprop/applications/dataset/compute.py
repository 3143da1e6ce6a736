"""Quantities over a whole data set: packprop streams batches, and merges their unscaled results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from packprop.applications.dataset.batch_pass import BatchPass
from packprop.applications.dataset.batches import Batches, Data
from packprop.applications.dataset.checkpoint import Checkpoint, Every, Told
from packprop.applications.dataset.given import device_of
from packprop.applications.dataset.identity import (
    OF_RANK,
    RANKS,
    Identity,
    difference,
    identity_of,
    keep_generators,
    warn_of_untold,
)
from packprop.applications.dataset.parts import needs_second_reading
from packprop.applications.dataset.rank_files import RankFiles
from packprop.applications.dataset.ranks import Ranks, ranks_for
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.run import Run
from packprop.applications.dataset.sharded import is_sharded_over, require_same_shards
from packprop.applications.dataset.shards import results_of, take_up_shards
from packprop.applications.dataset.sources import Samples, samplers_of
from packprop.applications.dataset.state import MergedResults
from packprop.applications.dataset.stored import stored_results
from packprop.applications.dataset.stream import BatchStream, ChunkSizesByBatch
from packprop.engine.algebra import SINGLE
from packprop.engine.distributed import AllRanks
from packprop.engine.memory import budget_of, chunk_sizes_over_data, step_over_data
from packprop.engine.passes import long_work_of, warn_of_diagonals, without_correlations
from packprop.engine.recording import extended
from packprop.engine.tensors import LossFunction, named_parameters, require_graphs, require_loss, require_model
from packprop.errors import BadInput
from packprop.extensions.arguments import require_own_savefields
from packprop.store.writing import StoreWriter
from packprop.types import Extension, Extensions, check_extensions

ASKED = "compute(...) was called."


def compute(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data | Batches,
    extensions: Extensions,
    *more: Extension,
    batch_size: int | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    checkpoint: str | Path | None = None,
    every: int | str = "30s",
    ranks: AllRanks | Literal["own", "all"] | None = None,
    store: StoreWriter | str | Path | None = None,
    losses: bool = False,
    compiled: bool = True,
) -> Result:
    """Compute the quantities of ``extensions`` for the loss over a whole data set, batch by batch.

    The values belong to one loss over all samples: under a mean loss the scale is 1 over the number of all
    terms, whatever the sizes of the batches; under a sum it is 1. ``compute`` leaves ``.grad`` alone and
    computes no gradients of weights.

    Args:
        model: The model, in the mode (train or eval) that you want; you need not extend it.
        loss: ``loss(model(inputs), targets)``, a loss module or function of torch that reduces by mean or sum.
            ``None`` if the model computes such a loss itself, from the whole batch, and returns it: as entry or
            attribute ``loss``, first in a tuple, or alone.
        data: A ``Dataset`` of pairs, a pair of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``; inputs may be a tuple
            or a mapping of arguments. A batch may also be one mapping, as Hugging Face's loaders give it:
            its ``labels`` are the targets, and the model takes the rest by name. The model and the loss take an
            object of any other class whole. Without ``loss``, the model takes all of a batch: a tensor, a tuple
            or a mapping of arguments, or an object.
        extensions: The quantities: an instance from ``packprop.extensions``, or a list of instances.
        more: Further extensions, if you give them one by one.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        progress: Show a progress bar on standard error, if that is a terminal: batches, samples in a second,
            time left, memory beside the budget.
        device: The device of batches; by default that of the model's parameters.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), with
            parameters, activations of a batch and results. packprop makes a plan for the first batch, and again
            for each batch that is larger along some axis than those before.
        checkpoint: A folder that keeps the run, made if it is missing. If a run ends, in whatever way,
            ``compute`` with the same arguments continues it, and ends with the same values. If the run is
            complete, ``compute`` returns its values at once. From a loader without ``state_dict``, packprop
            reads the first batches again, and compares them with those that the checkpoint covers.
        every: The interval between checkpoints: a time (``"30s"``, ``"5min"``, ``"1h"``) or a number of
            batches. If it is a time, writing takes at most a fiftieth of the run.
        ranks: The ranks whose samples count: this one (``"own"``), or all (``"all"``, or ``AllRanks`` for some
            of them), which must all call ``compute``; by default all, if there is a process group. packprop
            divides a data set with indices among them, batch by batch; other batches are each rank's own. All
            ranks get the same values; rows of samples are in the order of steps, then ranks. Each rank keeps
            its own sums in the checkpoint. A continued run ends with the same values if the number of ranks is
            the same, else with the same values up to rounding.
        store: A place for values of single samples, which are then not in the result: a folder to make, or a
            ``StoreWriter``, which stays open. Rows there belong to the loss summed over its terms. With a
            checkpoint, a continued run cuts off later rows; open a ``StoreWriter`` with ``resume=True`` for
            that. Each rank writes a shard.
        losses: Also store the loss of each sample, as ``store["loss"]`` ``[n]``: summed over the sample's
            terms, with their weights, and not divided by anything.
        compiled: Replay traced graphs in place of passes if that saves time (``packprop.compile``): mostly in
            small models, with a hundred batches or more to come. The last digits may then differ from run to
            run, so packprop replays nothing with a checkpoint, a budget, losses, or sharded parameters.
            ``Result.replays`` describes the effect.

    Raises:
        BadInput: For extensions that need all samples in one batch, or that read the data twice if packprop can
            read these only once; for data without samples, or a loss that cannot be called; for a checkpoint of
            another run, or a folder that is in use or holds other files; for a store that no value would go to,
            or that cannot be written.
        PackpropError: For a loss whose number of terms is not known, parameters of one name in model and loss,
            a parameter that some batches do not use, or a checkpoint that cannot be read; if another rank fails
            or ends.
    """
    group = ranks_for(ranks)
    group.arrive()
    with contextlib.ExitStack() as stack:

        def checked() -> tuple[tuple[Extension, ...], Batches, bool]:
            require_graphs(ASKED)
            require_model(ASKED, model)
            require_loss(ASKED, loss)
            chosen = check_extensions(ASKED, extensions, *more)
            _require_mergeable(chosen)
            sharded = is_sharded_over(ASKED, model, group, memory)
            whole = loss is None
            batches = data if isinstance(data, Batches) else Batches(ASKED, data, batch_size, whole)
            _require_rereadable(batches, chosen)
            _require_shards(batches, group)
            return chosen, batches, sharded

        def identified() -> Identity | None:
            if checkpoint is None and group.world == 1:
                if any(map(needs_second_reading, chosen)):
                    keep_generators(model, loss, batches)  # they draw the same numbers in the second reading
                return None
            options: dict[str, Any] = {"memory": memory, "stored": store is not None}
            if losses:
                options["losses"] = True
            if not isinstance(batches.source, Samples):
                options[RANKS] = group.world
            return identity_of(model, loss, chosen, batches, **options)

        def loaded() -> tuple[Checkpoint | None, Told | None, dict[str, Any] | None]:
            if checkpoint is None or identity is None:
                return None, None, None
            kept, told, own = Checkpoint(checkpoint, Every(every), identity), None, None
            if group.rank == 0:
                stack.enter_context(kept.open())
                told, own = kept.loaded() or (None, None)
            if told is not None:
                warn_of_untold(identity, data=told.facts["complete"] or batches.is_placed)
            return kept, told, own

        def begun() -> tuple[BatchStream, Run]:
            stored = stored_results(ASKED, store, model, chosen, resume=told is not None, losses=losses)
            if stored is not None and stored.writer is not store:
                stack.enter_context(stored.writer)
            if stored is not None and group.world > 1 and isinstance(batches.source, Samples):
                stored.indices = batches.source.indices  # ranks take one batch each in turn
            merged = [each for each in chosen if stored is None or each not in stored.extensions]
            step = BatchPass(ASKED, model, loss, results_of(model, merged, sharded), chosen, stored)
            step.sharded = group if sharded else None
            replays = compiled and checkpoint is None and memory is None and not (losses or sharded)
            stream = BatchStream(step, place, batches.left if replays else None)
            stack.enter_context(extended(*step.modules))
            stack.enter_context(long_work_of(chosen, bar=False))
            budget = budget_of(memory)
            run = Run(batches, stream, chunk_sizes, group, kept, files, progress, budget)
            if told is not None:
                run.go_on(told, own)
            return stream, run

        chosen, batches, sharded = group.attempt(checked)
        require_same_shards(ASKED, model, group)
        identity = group.attempt(identified)
        _require_same(group.each(identity))
        kept, told, own = group.attempt(loaded)
        files = None if kept is None else RankFiles(kept.folder, group)
        if sharded and files is not None:
            files.require_one_folder()
        told = group.each(told)[0]
        if files is not None and told is not None:
            own = files.read(told.files, own)
        place = device_of(model, device)
        chunk_sizes = ChunkSizesByBatch(
            lambda batch: chunk_sizes_over_data(step_over_data(model, loss, batch, chosen, place), memory)
        )
        stream, run = group.attempt(begun)
        shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
        if files is not None and told is not None:
            _take_up(stream.step.merged, told, files, shapes, place, group)
        result = run.to_the_end()
        result.replays, result.chunk_sizes = stream.told(), chunk_sizes.first
        result.tables = {savefield: _in_order(shapes, each) for savefield, each in result.tables.items()}
        _warn_of_diagonals(result, chosen, shapes)
        return result


def _take_up(
    merged: MergedResults,
    told: Told,
    files: RankFiles,
    shapes: Mapping[str, torch.Size],
    place: torch.device | str,
    ranks: Ranks,
) -> None:
    """Restore the shards that an earlier run kept; merge its results that were whole, and are sharded now."""
    if told.has_shards:
        take_up_shards(merged, files.shards(told.files), shapes, place, ranks)
    merged.end_pass(ranks)


def _warn_of_diagonals(
    result: Result, extensions: Iterable[Extension], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Warn, once for each extension, of parameters with a diagonal in place of a factor that is too large."""
    for extension in extensions:
        values = result.tables.get(extension.savefield, {})
        if named := [
            k for k, value in values.items() if without_correlations(extension, value, shapes.get(k, ()))
        ]:
            warn_of_diagonals(extension, named)


def _in_order(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the order of the model's parameters; a backward pass ends with the first layer."""
    return {name: values[name] for name in names if name in values} | dict(values)


def _require_mergeable(extensions: Sequence[Extension]) -> None:
    """Refuse extensions whose values packprop cannot merge over batches.

    Raises:
        BadInput: With the first such extension.
    """
    for extension in extensions:
        if any(row.over_n is SINGLE for row in extension.rows):
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "its value is a function that belongs to the graph of one backward pass",
                "ask for it in a separate backward pass, inside `with packprop.backpack(...)`",
            )
        if any(row.whole for row in extension.rows) or extension.subsampling is not None:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "its value depends on which samples are in one batch: on their products, or their indices",
                "use it in `with backpack(...)` on one batch",
            )
    require_own_savefields(ASKED, extensions, "compute one after the other")


def _require_rereadable(batches: Batches, chosen: Sequence[Extension]) -> None:
    """Refuse data that can be read only once, if an extension has to read them twice.

    Raises:
        BadInput: With the name of the extension.
    """
    if twice := [extension for extension in chosen if needs_second_reading(extension)]:
        instead = "give a list of batches, a data loader, a Dataset or tensors; or ask for KFAC or KFLR"
        batches.require_rereadable("data", f"extension {twice[0].name} goes over the samples twice", instead)


def _require_shards(batches: Batches, ranks: Ranks) -> None:
    """Refuse a sampler that gives some samples to two ranks, so that all have equally many.

    Raises:
        BadInput: If the data come from such a sampler.
    """
    found = [each for each in samplers_of(batches.source.data) if isinstance(each, DistributedSampler)]
    if ranks.world == 1 or not found:
        return
    sampler = found[0]
    samples = len(sampler.dataset)  # type: ignore[arg-type]  # it has asked for the length itself
    if sampler.total_size > samples:
        raise BadInput(
            ASKED,
            f"a DistributedSampler of {samples} samples for {sampler.num_replicas} ranks",
            f"it gives {sampler.total_size - samples} of them twice, so that all ranks have equally many",
            "give the Dataset itself: packprop divides it, and repeats no sample",
        )


def _require_same(identities: Sequence[Identity | None]) -> None:
    """Refuse ranks whose calls differ.

    Raises:
        BadInput: On every rank, with the first difference.
    """
    for rank, identity in enumerate(identities):
        if identity is None or identities[0] is None:
            continue
        found = difference(identities[0], identity, but=OF_RANK)
        if found is not None:
            raise BadInput(
                ASKED,
                f"rank {rank}",
                f"its call differs from that of rank 0 by its {found[0]}: {found[1]}",
                "call compute(...) with the same model, extensions, options and data set on every rank (only "
                "batches may differ), or with ranks='own'",
            )
