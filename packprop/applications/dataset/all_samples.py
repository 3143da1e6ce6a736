"""Tensors of all samples, as a data set."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from packprop.applications.dataset.messages import shapes
from packprop.engine.tensors import map_tensors, tensors_in
from packprop.errors import BadInput

INSTEAD = (
    "give a tensor of inputs [n, ...] and a tensor of targets [n, ...], as (inputs, targets); a tuple or a "
    "mapping of such tensors for a model of several arguments, as ((a, b), targets); a list of batches, "
    "[(inputs, targets)], if the tensors of a batch have different lengths, as for graphs; or batches without "
    "targets, as dictionaries of the model's arguments by name"
)


class Arguments(Dataset[tuple[Any, Tensor]]):
    """Samples of a model that takes several arguments.

    Args:
        inputs: A tuple, list or mapping of tensors ``[n, ...]``.
        targets: A tensor ``[n, ...]``.
    """

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return map_tensors(lambda tensor: tensor[index], self.inputs), self.targets[index]


def as_data_set(asked: str, data: Any, whole: bool) -> Any:
    """Return tensors of all samples as a data set, and other data unchanged.

    Args:
        asked: The call of the user, for messages.
        data: Data of any form.
        whole: True if the model takes whole batches, without separate targets.

    Raises:
        BadInput: For tensors of unequal lengths, or for more tensors than inputs and targets.
    """
    if not isinstance(data, (tuple, list)) or not data or (whole and isinstance(data, list)):
        return data  # without separate targets, a list holds batches
    alone = all(isinstance(each, Tensor) for each in data)
    if not alone and (whole or not _is_pair(data)):
        return data
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(data)}
    if len(sizes) != 1 or (len(data) != 2 and not whole):
        why = "they are not a pair whose first axes hold the same number of samples"
        raise BadInput(asked, f"data, tensors {shapes(data)}", why, INSTEAD)
    return TensorDataset(*data) if alone else Arguments(*data)


def _is_pair(data: tuple[Any, ...] | list[Any]) -> bool:
    """Tell whether data are several inputs and their targets, and not two batches with targets of their own."""
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[1], Tensor):
        return False
    inputs = data[0].values() if isinstance(data[0], Mapping) else data[0]
    nested = isinstance(data[0], (tuple, list, MutableMapping)) and bool(data[0])  # as map_tensors takes them
    return nested and all(isinstance(each, Tensor) for each in inputs)
