"""Errors about the samples of a pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from packprop.errors import PackpropError
from packprop.functions.losses import number_of_samples
from packprop.graph.graph import Graph, ReachedUse
from packprop.samples.loss_rows import declaration
from packprop.samples.separation import ModelOutput


def mixed(graph: Graph, mixing: ReachedUse, hiding: Tensor | None = None) -> PackpropError:
    """The samples are mixed below a use; ``hiding``: the leaf whose present values hide it."""
    place = graph.uses.index(mixing)
    after = f" and {graph.label(graph.uses[place - 1])}" if place else " and the loss"
    where = f"between {graph.label(mixing)}{after}"
    if hiding is not None:
        name = graph.name(hiding)
        return PackpropError(
            graph.asked,
            where,
            f"the samples are mixed there, and only the present values of {name!r} hide it: the loss of one "
            f"sample depends on the inputs of others as soon as {name!r} changes",
            "keep the samples independent of each other, or set requires_grad=False on that parameter",
        )
    if graph.documents is not None:
        return PackpropError(
            graph.asked,
            where,
            "documents meet there: the loss of one depends on the inputs of another one, as with a mask that "
            "does not keep them apart, or in a layer that runs over all positions of a row; or no axes of the "
            f"output, of shape {list(mixing.recorded.shapes[0])}, hold them",
            "keep documents apart (a block-diagonal mask), or leave record(documents=...) out: a row is a "
            "sample then",
        )
    return PackpropError(
        graph.asked,
        where,
        f"the samples are mixed there: the loss of one of {graph.samples} depends on the inputs of others, or "
        f"no axis of the output, of shape {list(mixing.recorded.shapes[0])}, holds them. Sample n is row n of "
        f"what the loss takes{_declared(graph)}",
        "keep the samples apart (no statistics over the batch); declare their axis if the loss takes another "
        "one first, extend(model, sample_axis=1); if several rows of the loss are of one sample, flatten them "
        "in front of it from a tensor [n, t, c]; or set requires_grad=False on the parameters upstream",
    )


def _declared(graph: Graph) -> str:
    said = declaration(graph)
    return f", along {said}" if said else ""


def require_samples(graph: Graph, outputs: Sequence[ModelOutput]) -> None:
    """Raise if there is nowhere to feed samples in."""
    if not outputs:
        raise PackpropError(
            graph.asked,
            "the tensor that backward() was called on",
            "neither a recorded loss nor the output of an extended module lies between it and the parameters",
            "let a loss function of torch make it, as an extended module or as a function inside "
            "`with packprop.record():`; or extend a module of your own that takes the model's output",
        )
    empty = [output for output in outputs if not number_of_samples(output.loss, output.shape)]
    if empty:
        raise PackpropError(
            graph.asked,
            f"the model's output, of shape {list(empty[0].shape)}",
            "the batch is empty",
            "leave the pass out (`if len(x):`), or ask without probes, plans and other ranks",
        )
    if not (graph.losses or graph.open or all(output.shape for output in outputs)):
        raise PackpropError(
            graph.asked,
            "the model's output, one number",
            "no loss function that packprop has a rule for made it, so that no axis of it holds the samples",
            "let the model return what the number is computed from, and compute the loss outside of it; or "
            "let it call a loss function of torch; or a module without parameters that takes what the number "
            "is computed from and the targets, after packprop.extend(module)",
        )
