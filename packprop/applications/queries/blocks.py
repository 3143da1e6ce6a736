"""The choice of one curvature from the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packprop.applications.dataset.result import Result
from packprop.errors import BadInput

CURVATURES = (
    "ekfac",
    "kfac",
    "kflr",
    "kfra",
    "hbp",
    "diag_ggn_exact",
    "diag_ggn_mc",
    "diag_h",
    "diag_h_mc",
)
"""Names of the entries of a ``Result`` that are curvature, and that packprop can invert."""


Curvature = Result | Mapping[str, Any] | str | Path
"""A result of ``compute``, its file, or blocks by parameter."""


def blocks_of(asked: str, curvature: Curvature) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a curvature, and its blocks by parameter.

    Raises:
        BadInput: For a result that holds no curvature or several, or something else than ``Curvature``.
    """
    if isinstance(curvature, (str, Path)):
        curvature = Result.load(curvature)
    if not isinstance(curvature, Result):
        if isinstance(curvature, Mapping):
            return "the given curvature", curvature
        raise BadInput(
            asked,
            f"curvature of type {type(curvature).__name__}",
            "it is neither a Result nor a mapping with a block for each parameter",
            "give what packprop.compute returned, the path of its file, or one of its entries",
        )
    known = [name for name in CURVATURES if name in curvature]
    if len(known) == 1:
        return known[0], curvature[known[0]]
    raise BadInput(
        asked,
        f"the curvature, a Result of {', '.join(curvature) or 'nothing'}",
        f"{', '.join(known)} are curvature, and one of them must be chosen" if known else "none is curvature",
        f"give result[{known[0]!r}]" if known else f"compute one of {', '.join(CURVATURES)}",
    )
