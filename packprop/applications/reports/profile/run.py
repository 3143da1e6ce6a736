"""``profile``: one pass over the data with the extensions of a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Data
from packprop.applications.dataset.compute import compute
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.given import require_model_and_loss
from packprop.applications.dataset.messages import described, explanation
from packprop.applications.reports.profile.assembly import assemble
from packprop.applications.reports.profile.costs import memory_use
from packprop.applications.reports.profile.outlying import (
    SHOWN,
    Decode,
    NotFoundAgain,
    ReadableBatches,
    check_decode,
    extents_of,
    outlying_samples,
    size_of,
)
from packprop.applications.reports.profile.quantities import EXACT_OUTPUTS, LARGEST_FACTOR, extensions_of
from packprop.applications.reports.profile.result import Profile
from packprop.engine.graph import walk
from packprop.engine.passes import default_chunk_sizes
from packprop.engine.recording import extended, record
from packprop.engine.samples import check_graph
from packprop.engine.tensors import (
    LossFunction,
    class_before_sharding,
    has_sharded_units,
    moved,
    outputs_and_loss,
)
from packprop.errors import BadInput, PackpropError, require_number, require_seed
from packprop.store.describing import packprop_version

ASKED = "packprop.profile(...) was called."


def profile(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data,
    *,
    batch_size: int | None = None,
    mc_samples: int = 1,
    exact: bool | None = None,
    curvature: bool = True,
    largest_factor: int = LARGEST_FACTOR,
    evaluation: bool = True,
    seed: int = 0,
    progress: bool = True,
    memory: int | str | None = None,
    checkpoint: str | Path | None = None,
    every: int | str = "30s",
    compiled: bool = True,
    outliers: int = SHOWN,
    decode: Decode | None = None,
    timeline: bool = False,
) -> Profile:
    """Compute gradients and curvature of a model on its data, layer by layer, in one pass over the data.

    NOTE [Profile quantities] defines the values. ``profile`` leaves the model as it was, ``.grad`` included.

    Args:
        model: Any module; you need not extend it. Batches go to the device of its parameters.
        loss: ``loss(model(inputs), targets)``: one loss of torch with reduction "mean" or "sum", as
            a module or a function; ``None`` if the model computes it, as for ``compute``.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches, such as a ``DataLoader``, in any form that ``compute`` takes.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches. It
            changes memory and time, and which Monte Carlo draws are made, but no other number.
        mc_samples: Draws for each sample, for the Monte Carlo trace and the Kronecker factors.
        exact: Compute the exact GGN trace, which takes a backward pass for each output of a sample; by default
            only if a sample has at most 32 outputs.
        curvature: Compute the GGN trace and Kronecker factors.
        largest_factor: Leave out Kronecker factors with a longer side than this.
        evaluation: Switch the model to evaluation mode for the pass, so that dropout is off and batch
            normalisation does not mix samples.
        seed: Seed of the Monte Carlo draws.
        progress: Show a progress bar on standard error, if that is a terminal.
        memory: The most bytes of tensor storage that may be alive at once, ``"600MiB"`` or a number.
        checkpoint: A folder that keeps the run, as for ``compute``: the same call continues it.
        every: How often to write the checkpoint, as for ``compute``.
        compiled: Let graphs replace passes if that pays, as for ``compute``; the settings then describe the
            effect.
        outliers: The number of samples with the largest gradients to keep. ``profile`` reads these from a data
            set by index; it reads batches, as from a loader, again up to the last of these samples. With 0 it
            does neither.
        decode: ``decode(inputs, targets)`` of one of these samples, without a leading axis, returns its text; a
            list of one text for each token of the targets, which the page shades by the loss of each; or an
            image ``[height, width]`` or ``[3, height, width]``. Without it the page shows images, and the
            first numbers of anything else.
        timeline: Plan the pass over the first batch, run it once more, and note the memory that each operation
            leaves alive, and the time and memory of each quantity in each layer.

    Returns:
        The profile, which prints as a table, draws a page, saves and loads.

    Raises:
        BadInput: If an argument is none of the above, there are no data, or the model or the loss fails on a
            batch.
        PackpropError: If packprop cannot compute the quantities for this model or loss.
    """
    _check(model, loss, batch_size, mc_samples, largest_factor, seed)
    _check_outliers(outliers, decode)
    batches = ReadableBatches(ASKED, data, batch_size, whole=loss is None)
    started = time.perf_counter()
    device = next(p for p in model.parameters() if p.requires_grad).device
    with _evaluating(model, evaluation):
        with batches.explained():
            if checkpoint is not None:
                batches.described(Describer())  # keeps the states of generators before a batch is drawn
            first = batches.first()
            if outliers and first is not None:
                check_decode(decode, first)
            outputs = _outputs_of_a_sample(model, loss, first, device)
        if exact is None:
            exact = outputs is not None and outputs <= EXACT_OUTPUTS
        extensions = partial(extensions_of, curvature, exact, mc_samples, largest_factor, seed, device)
        asked_for = extensions()
        with _naming_the_option():
            result = compute(
                model,
                loss,
                batches,
                list(asked_for.values()),
                progress=progress,
                memory=memory,
                checkpoint=checkpoint,
                every=every,
                compiled=compiled,
            ).whole()
        settings = {
            "model": class_before_sharding(model).__name__,
            "loss": _name_of(loss),
            "device": str(device),
            "precision": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
            "mode": _mode_of(model) if not evaluation else "evaluation",
            "monte_carlo_samples": mc_samples if curvature else None,
            "outputs_of_a_sample": outputs,
            "largest_factor": largest_factor if curvature else None,
            "seed": seed,
            "data": batches.stamp,
            "packprop": packprop_version(),
            "torch": torch.__version__,
        }
        if result.replays is not None:
            settings["graphs"] = result.replays
        tables = {key: result[extension] for key, extension in asked_for.items()}
        found = assemble(model, result, tables, batches.count, settings, started)
        if timeline and has_sharded_units(model):
            found.missing["memory"] = (
                "fully_shard has sharded the model; packprop.plan(..., mesh_shape=...) shows what it takes"
            )
        elif timeline and first is not None:
            sizes = result.chunk_sizes or default_chunk_sizes(device)
            with _kept_without(found, "memory"):
                used = memory_use(model, loss, first, lambda: [*extensions().values()], sizes, memory, device)
                found = dataclasses.replace(found, memory=used)
        else:
            found.missing["memory"] = "packprop.profile(..., timeline=True) measures it"
        return _with_outliers(found, model, loss, batches, outliers, decode, device)


def _with_outliers(
    found: Profile,
    model: nn.Module,
    loss: LossFunction | None,
    batches: ReadableBatches,
    count: int,
    decode: Decode | None,
    device: torch.device,
) -> Profile:
    """Return the profile with its outlying samples, or the reason why they are missing."""
    norms = found.norms_of(found.total)
    if not count:
        found.missing["outlying"] = "packprop.profile(..., outliers=0) kept none"
    elif norms is None:
        found.missing["outlying"] = "the loss does not depend on a parameter"
    else:
        with _kept_without(found, "outlying"):
            rows, pictures = outlying_samples(model, loss, batches, norms, count, decode, device)
            return dataclasses.replace(found, outlying=rows, tensors={**found.tensors, **pictures})
    return found


@contextlib.contextmanager
def _kept_without(found: Profile, what: str) -> Iterator[None]:
    """Note any error inside as the reason why ``what`` is missing, and keep the values computed before."""
    try:
        yield
    except NotFoundAgain as error:
        found.missing[what] = f"{error.why}; to see them, {error.instead}"
    except PackpropError as error:
        found.missing[what] = f"{error.where}: {error.why}"
    except Exception as error:
        found.missing[what] = explanation(error)


@contextlib.contextmanager
def _naming_the_option() -> Iterator[None]:
    """Add to refusals of curvature the advice to make a profile without it."""
    try:
        yield
    except PackpropError as error:
        if not error.asked.startswith("A generalized Gauss-Newton quantity"):
            raise
        raise PackpropError(
            error.asked,
            error.where,
            error.why,
            f"{error.instead}; or leave curvature out: profile(..., curvature=False), "
            "packprop profile --no-curvature",
        ) from error


def _check(model: Any, loss: Any, batch_size: Any, mc_samples: Any, largest_factor: Any, seed: Any) -> None:
    require_model_and_loss(ASKED, model, loss, "profiled")
    numbers = {
        "batch_size": 1 if batch_size is None else batch_size,
        "mc_samples": mc_samples,
        "largest_factor": largest_factor,
    }
    for name, number in numbers.items():
        require_number(ASKED, name, number)
    require_seed(ASKED, seed)


def _check_outliers(outliers: Any, decode: Any) -> None:
    if not isinstance(outliers, int) or isinstance(outliers, bool) or outliers < 0:
        raise BadInput(ASKED, f"outliers={outliers!r}", "it is no whole number of at least 0", "give 0 or more")
    if decode is not None and not callable(decode):
        instead = "give a function of the inputs and targets of one sample"
        raise BadInput(ASKED, f"decode, {described(decode)}", "it cannot be called", instead)


def _outputs_of_a_sample(
    model: nn.Module, loss: LossFunction | None, batch: Any, device: torch.device
) -> int | None:
    """Return the number of entries of a sample's output; ``None`` if the output is no tensor."""
    inputs, targets = moved(batch, device)
    sharded = has_sharded_units(model)  # its sweeps are those of all ranks together
    with extended(model, loss), record(), torch.set_grad_enabled(not sharded):
        outputs, value = outputs_and_loss(ASKED, model, loss, inputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BadInput(
            ASKED,
            f"the loss, {_name_of(loss)}",
            f"it returned {described(value)} instead of one number",
            "use a loss with reduction='mean' or reduction='sum'",
        )
    samples = size_of(extents_of(inputs)) if sharded else _samples_of(value)
    return outputs.numel() // samples if isinstance(outputs, Tensor) and samples else None


def _samples_of(loss: Tensor) -> int:
    """Return the number of samples in the graph of a loss; 0 if the pass over the data will refuse it."""
    try:
        graph = walk([loss], [None], None)
        check_graph(graph)
    except PackpropError:
        return 0
    return graph.samples


def _name_of(loss: LossFunction | None) -> str:
    return "the model's own loss" if loss is None else getattr(loss, "__name__", type(loss).__name__)


def _mode_of(model: nn.Module) -> str:
    modes = {module.training for module in model.modules()}
    return "mixed" if len(modes) == 2 else "training" if modes == {True} else "evaluation"


@contextlib.contextmanager
def _evaluating(model: nn.Module, evaluation: bool) -> Iterator[None]:
    """Switch to evaluation mode inside, if ``evaluation``; afterwards restore every module's own mode."""
    before = {module: module.training for module in model.modules()}
    try:
        if evaluation:
            model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training
