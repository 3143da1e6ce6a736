"""Documents: several samples in one row, as you declare them.

# NOTE [Documents]
A row into which several documents are packed is one sample, unless ``record(documents=...)`` gives the document
of each position of a loss's input. Then the documents are the samples, and the losses have layouts of rows
(NOTE [Rows of samples]). The declaration is about the losses alone: the sweeps find the document of each row of
a use's output, along one axis or along neighbouring axes with as many entries as the declaration. If a mask
lets one document see another, or a layer runs over all positions of a row, rows come back that belong to
several documents, and packprop refuses the pass. It does not see what documents exchange before the first
parameter: this is a constant of each document.

Data decide where documents are, so packprop looks for them in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from packprop.engine.graph.graph import Graph
from packprop.engine.samples.feeding import ModelOutput
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout, layout_of_rows
from packprop.errors import PackpropError

FEW = 1024
"""Numbers up to this one, and 16 more for each position, may be declared for documents."""


def layouts_of_documents(graph: Graph, outputs: Sequence[ModelOutput]) -> list[Layout]:
    """Return the layouts of the declared documents in the inputs of the losses.

    Raises:
        PackpropError: If they were not declared for all losses or not for each position, if a number is
            negative or far beyond the number of positions, or in a dry run, which has no data.
    """
    if is_dry_run():
        raise without_plan()
    declared = [None if loss.call.documents is None else loss.call.documents.cpu() for loss in graph.losses]
    declared += [None] * (len(outputs) - len(declared))
    numbers: list[Tensor] = []
    for output, each in zip(outputs, declared, strict=True):
        if each is None:
            raise PackpropError(
                graph.asked,
                f"an output of the model, of shape {list(output.shape)}",
                "documents were declared for another loss of this pass, not for the one that takes this output",
                "call each loss inside a `with packprop.record(documents=...):` with the numbers of its rows, "
                "as a loss function that packprop records",
            )
        numbers.append(each)
    if any(bool((each < 0).any()) for each in numbers):
        raise PackpropError(
            graph.asked,
            "record(documents=...)",
            "there is a negative number in it: each position belongs to a document",
            "count documents from 0 on, and give padding the number of the document before it, or its own",
        )
    count, positions = 1 + max(int(each.max()) for each in numbers), sum(each.numel() for each in numbers)
    if count > FEW + 16 * positions:
        raise PackpropError(
            graph.asked,
            "record(documents=...)",
            f"the largest number is {count - 1}, for {positions} positions, and each number has its row",
            "count documents from 0 on: documents.unique(return_inverse=True)[1]",
        )
    return [
        _layout_of_documents(graph, output, each, count) for output, each in zip(outputs, numbers, strict=True)
    ]


def without_plan(where: str = "record(documents=...)") -> PackpropError:
    """Return the error for a plan if data decide which rows belong to a sample, as for documents or graphs."""
    return PackpropError(
        "A plan was asked for.",
        where,
        "a plan is made without data, and only data tell how many rows each sample has there",
        "leave the plan and memory=... out",
    )


def _layout_of_documents(graph: Graph, output: ModelOutput, documents: Tensor, count: int) -> Layout:
    """Return the layout of the documents in a loss's input."""
    shape, class_axis = output.shape, output.loss.class_axis
    axes = [axis for axis, _ in enumerate(shape) if axis != class_axis]
    if class_axis is None:  # the last axes are those of one position
        sizes = [math.prod(shape[: axis + 1]) for axis in axes]
        axes = axes[: sizes.index(documents.numel()) + 1] if documents.numel() in sizes else []
    where = f"the input of a loss, of shape {list(shape)}"
    if not axes or math.prod(shape[axis] for axis in axes) != documents.numel():
        raise PackpropError(
            graph.asked,
            f"{where}, and documents of shape {list(documents.shape)}",
            "there must be one number for each position of the loss's input",
            "cut documents like the logits: documents[:, :-1] if the last position predicts nothing",
        )
    long = [axis for axis in axes if shape[axis] != 1] or axes[:1]
    if count == 1:
        return Layout(None, 1)
    if long != [*range(long[0], long[-1] + 1)]:
        raise PackpropError(
            graph.asked,
            where,
            f"documents run along its axes {' and '.join(map(str, long))}, which are not adjacent",
            "flatten them: cross_entropy(logits.flatten(0, 1), targets.flatten())",
        )
    joined = tuple(torch.Size(shape[long[0] : long[-1] + 1])) if len(long) > 1 else ()
    return layout_of_rows(long[0], documents.flatten().long(), count, joined)
