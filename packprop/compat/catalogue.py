"""Extensions of packprop under their names in BackPACK; they also take module extensions."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from packprop import extensions
from packprop.compat.options import BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy
from packprop.compat.own import (
    FAIL_SILENT,
    BackpropExtension,
    FirstOrderBackpropExtension,
    SecondOrderBackpropExtension,
    Unsupported,
)
from packprop.engine.passes import knows_nothing
from packprop.engine.tensors import tensor_of
from packprop.types import Extension, Row, Seed


class Catalogued(BackpropExtension):
    """Base class that adds module extensions for some classes of modules to packprop's own extensions.

    Values of module extensions replace those of packprop. If the extension has columns, each method of a
    module extension gets the columns of the root of the GGN at the module's output, ``[v, n, *y]``.
    """

    rows: Sequence[Row]
    subsampling: Sequence[int] | None
    mc_samples: int  # only extensions with draws have it
    _fail_mode = FAIL_SILENT

    def get_subsampling(self) -> list[int] | None:
        """Return the indices of the samples; ``None`` for all."""
        return None if self.subsampling is None else list(self.subsampling)

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte Carlo draws."""
        return self.mc_samples

    def expects_backpropagation_quantities(self) -> bool:
        """Tell whether the extension needs more than inputs and the gradient."""
        return any(row.seed.kind not in ("none", "gradient") for row in self.rows)

    @property
    def seed(self) -> Seed:
        """Return the seed of the columns; an exact one has a column for each output entry, as in BackPACK.

        Raises:
            Unsupported: If the extension has no columns that module extensions could get.
        """
        for row in self.rows:
            if row.seed.kind == "ggn":
                return dataclasses.replace(row.seed, entrywise=row.seed.mc_samples is None)
        raise Unsupported(
            f"{type(self).__name__} was to run a module extension.",
            type(self).__name__,
            "the vectors that it propagates back are not columns of a root",
            "leave the module extension out: packprop differentiates the module by autograd",
        )


class FirstOrder(Catalogued, FirstOrderBackpropExtension):
    """Base class of extensions that need gradients alone."""


class SecondOrder(Catalogued, SecondOrderBackpropExtension):
    """Base class of all other extensions."""


class GGNRoot(SecondOrder):
    """BackPACK's accessors, for extensions that sum over columns of the GGN's root, or return these columns."""

    @property
    def loss_hessian_strategy(self) -> str:
        """Return ``"exact"`` or ``"sampling"``."""
        return LossHessianStrategy.EXACT if self.seed.mc_samples is None else LossHessianStrategy.SAMPLING

    def get_loss_hessian_strategy(self) -> str:
        """Return ``"exact"`` or ``"sampling"``."""
        return self.loss_hessian_strategy

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Add up columns that arrive at one tensor."""
        return existing + other


class Kronecker(SecondOrder):
    """BackPACK's accessors, for extensions with Kronecker factors; for ``HBP`` they return its arguments."""

    curv_type: str = Curvature.GGN
    loss_hessian_strategy: Any = LossHessianStrategy.SUM
    backprop_strategy: str = BackpropStrategy.BATCH_AVERAGE
    ea_strategy: str = ExpectationApproximation.BOTEV_MARTENS

    def get_curv_type(self) -> str:
        """Return the name of the matrix."""
        return self.curv_type

    def get_loss_hessian_strategy(self) -> str:
        """Return the representation of the loss's Hessian."""
        return str(self.loss_hessian_strategy)

    def get_backprop_strategy(self) -> str:
        """Return the propagated quantity."""
        return self.backprop_strategy

    def get_ea_strategy(self) -> str:
        """Return the choice of means over samples."""
        return self.ea_strategy


class KroneckerRoot(GGNRoot, Kronecker):
    """Base class of extensions with Kronecker factors from columns of the GGN's root."""

    backprop_strategy = BackpropStrategy.SQRT


class PositiveCurvature(SecondOrder):
    """BackPACK's accessors, for products with the positive-curvature Hessian."""

    modify: str

    def get_modification_mode(self) -> str:
        """Return the treatment of negative curvature."""
        return self.modify


FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
DIAG_GGN = ("BatchDiagGGNExact", "BatchDiagGGNMC", "DiagGGNExact", "DiagGGNMC")
DIAG_HESSIAN = ("BatchDiagHessian", "DiagHessian")
KRONECKER = ("HBP", "KFAC", "KFLR", "KFRA")
SQRT_GGN = ("SqrtGGNExact", "SqrtGGNMC")
PRODUCTS = ("GGNMP", "HMP", "PCHMP")
BASES: dict[str, type[Catalogued]] = {
    **dict.fromkeys((*FIRST_ORDER, "BatchDotGrad"), FirstOrder),
    **dict.fromkeys((*DIAG_GGN, *SQRT_GGN), GGNRoot),
    **dict.fromkeys(("HBP", "KFRA"), Kronecker),
    **dict.fromkeys(("KFAC", "KFLR"), KroneckerRoot),
    "PCHMP": PositiveCurvature,
}
"""The second base class of some extensions; that of all others is ``SecondOrder``."""


def is_available(name: str) -> bool:
    """Tell whether packprop has an extension of this name."""
    value = getattr(extensions, name, None)
    return isinstance(value, type) and issubclass(value, Extension) and value is not Extension


def _indices(chosen: Any) -> list[int] | None:
    """Return a list of indices, those of a mask as well; ``None`` for values that packprop itself checks."""
    if chosen is None or isinstance(chosen, str):
        return None
    try:
        indices = tensor_of(chosen)
    except (TypeError, ValueError, RuntimeError):
        return None
    if indices.dim() != 1 or (indices.is_floating_point() and len(indices)) or indices.is_complex():
        return None
    listed: list[int] = (indices.nonzero().flatten() if indices.dtype == torch.bool else indices).tolist()
    return listed


@functools.cache
def _with_module_extensions(name: str) -> type:
    original = getattr(extensions, name)

    def take_subset(extension: Any) -> None:
        """Check the arguments; ``subsampling`` may be anything that indexes an axis of a tensor, and empty."""
        chosen = _indices(getattr(extension, "subsampling", None))
        is_empty = chosen == [] and knows_nothing(extension)
        if chosen is not None:
            object.__setattr__(extension, "subsampling", None if is_empty else chosen)
        original.__post_init__(extension)
        if is_empty:
            object.__setattr__(extension, "subsampling", chosen)  # packprop itself refuses an empty choice

    meta = abc.ABCMeta if name == "HBP" else type
    content = {"__module__": __name__, "__doc__": original.__doc__, "__post_init__": take_subset}
    made = meta(name, (original, BASES.get(name, SecondOrder)), content)
    if isinstance(made, abc.ABCMeta):  # in BackPACK, KFAC, KFLR and KFRA are subclasses of HBP
        for other in filter(is_available, set(KRONECKER) - {name}):
            made.register(_with_module_extensions(other))
    return made


def __getattr__(name: str) -> Any:
    if not is_available(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _with_module_extensions(name)
