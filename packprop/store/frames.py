"""Values of samples as a data frame of pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packprop.errors import BadInput, install

MOST_COLUMNS = 10_000
"""The most columns of a table that anyone would read."""


def to_frame(identifiers: np.ndarray, arrays: Mapping[tuple[str, str], Any], quantities: Sequence[str]) -> Any:
    """Make a frame of samples, with columns such as ``"batch_l2/0.weight"``, ``"loss"``, ``"x[0]"``.

    Raises:
        BadInput: If pandas is missing, a quantity is not stored, or there are too many columns.
    """
    asked = "A data frame of a store was asked for."
    pandas = required_pandas(asked)
    known = list(dict.fromkeys(quantity for quantity, _ in arrays))
    for quantity in quantities:
        if quantity not in known:
            raise BadInput(asked, f"quantity {quantity!r}", f"the store has {known}", "choose from these")
    chosen = {
        key: array
        for key, array in arrays.items()
        if (key[0] in quantities if quantities else math.prod(array.shape[1:]) == 1)
    }
    number = sum(math.prod(array.shape[1:]) for array in chosen.values())
    if number > MOST_COLUMNS:
        raise BadInput(
            asked,
            f"{', '.join(dict.fromkeys(key[0] for key in chosen))}",
            f"they have {number} entries for each sample",
            f"choose quantities with at most {MOST_COLUMNS} entries in all, or read single arrays",
        )
    columns: dict[str, np.ndarray] = {}
    for (quantity, parameter), array in chosen.items():
        name = f"{quantity}/{parameter}" if parameter else quantity
        values = array.numpy().reshape(len(array), math.prod(array.shape[1:]))
        for index in range(values.shape[1]):
            columns[f"{name}[{index}]" if len(array.shape) > 1 else name] = values[:, index]
    return pandas.DataFrame(columns, index=pandas.Index(identifiers, name="sample"))


def required_pandas(asked: str) -> Any:
    """Import the module pandas.

    Raises:
        BadInput: If it is missing.
    """
    try:
        import pandas
    except ImportError as error:
        raise BadInput(asked, "pandas", "it is not installed", install("frames")) from error
    return pandas
