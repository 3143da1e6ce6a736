"""Calling a model on a batch: finding its inputs, its targets and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.tensors.objects import Apart, apart, together
from packprop.errors import BadInput

LossFunction = Callable[[Any, Any], Tensor]
"""Maps outputs and targets to the loss."""

LABELS = "labels"
"""The key of the targets in a batch that is one mapping, as training loops for Hugging Face models have it."""


def require_model(asked: str, model: Any) -> None:
    """Refuse a model that is no module.

    Raises:
        BadInput: If it is something else.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(asked, f"model, {_described(model)}", "it is not a torch.nn.Module", _instance_of(model))


def require_graphs(asked: str) -> None:
    """Refuse a call where a forward pass makes no graph.

    Raises:
        BadInput: Inside ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise BadInput(
            asked,
            "torch.inference_mode()",
            "tensors that are made inside never have a graph; torch.no_grad() does no harm",
            "call it outside, with data that were made outside",
        )


def require_loss(asked: str, loss: Any) -> None:
    """Refuse a loss that cannot be called with outputs and targets; ``None`` if the model computes it.

    Raises:
        BadInput: For a name, a class, or anything else that is no function.
    """
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        why = "it is not a function of outputs and targets"
        raise BadInput(asked, f"loss, {_described(loss)}", why, _instance_of(loss))


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, str) else class_words(value)


def class_words(value: Any) -> str:
    """Return the words for a value's class in messages; for a class, its own name."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _instance_of(value: Any) -> str:
    if isinstance(value, type):
        return f"give an instance, {value.__name__}(...)"
    return "give a module such as torch.nn.Linear(3, 2) or torch.nn.CrossEntropyLoss()"


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model on a tensor, or on a tuple, list or mapping of arguments.

    A data loader turns a tuple of a data set into a list. An object goes into the model whole.
    """
    return _called(model, together(inputs))


def _called(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def inputs_and_targets(batch: Any, whole: bool) -> tuple[Any, Any] | None:
    """Split a batch into the model's inputs and the loss's further arguments; ``None`` if unclear.

    A model that computes the loss itself gets the batch ``whole``. An object goes whole into the model and
    into the loss; see NOTE [Objects in batches].
    """
    batch = apart(batch)
    if whole:
        return batch, None
    if isinstance(batch, Mapping) and LABELS in batch:
        return {key: value for key, value in batch.items() if key != LABELS}, batch[LABELS]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return (batch, batch) if isinstance(batch, Apart) else None


def outputs_and_loss(
    asked: str, model: nn.Module, loss: LossFunction | None, inputs: Any, targets: Any
) -> tuple[Any, Tensor]:
    """Return the model's outputs, and the loss: that of ``loss``, or the one that the model computed.

    Raises:
        BadInput: If the model has to compute the loss itself and returns none.
    """
    inputs, targets = together((inputs, targets))  # an object in both is one
    outputs = _called(model, inputs)
    if loss is not None:
        return outputs, loss(outputs, targets)
    found = _loss_among(outputs)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise BadInput(
            asked,
            f"the outputs of the model, {type(model).__name__}, of type {type(outputs).__name__}",
            "they hold no loss of one entry: neither an entry or attribute 'loss', nor a scalar that is "
            "the output itself or the first of a tuple",
            f"let the batches hold what the model computes its loss from (for Hugging Face models {LABELS!r}), "
            "or give a loss of outputs and targets",
        )
    return outputs, found


def _loss_among(outputs: Any) -> Any:
    """Return the loss in a model's output, if it is in one of the usual places."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else None
    return first if isinstance(first, Tensor) and first.dim() == 0 else None
