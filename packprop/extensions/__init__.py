"""The catalogue of quantities that one backward pass computes; each is a class with a few rows."""

from typing import TYPE_CHECKING

from packprop.extensions.diagonal import (
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
)
from packprop.extensions.first_order import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    SumGradSquared,
    Variance,
)
from packprop.extensions.hessian import BatchDiagHessian, DiagHessian, DiagHessianMC
from packprop.extensions.jacobian import BatchJacobian
from packprop.extensions.kronecker import EKFAC, KFAC, KFLR
from packprop.extensions.products import GGNMP, HMP, PCHMP
from packprop.extensions.projected import Projected
from packprop.extensions.square_root import SqrtGGNExact, SqrtGGNMC
from packprop.types import Extension, Row

if TYPE_CHECKING:
    from packprop.compat.averaged import HBP, KFRA

# Rare ones stand outside the engine, and are imported when they are first asked for: name -> where it is.
_OUTSIDE = {"HBP": "packprop.compat.averaged", "KFRA": "packprop.compat.averaged"}

__all__ = [
    "EKFAC",
    "GGNMP",
    "HBP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchDotGrad",
    "BatchGrad",
    "BatchJacobian",
    "BatchL2Grad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "DiagHessianMC",
    "Extension",
    "Projected",
    "Row",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
]

# Type checkers would take this for a module that has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a rare extension."""
        from importlib import import_module

        if name not in _OUTSIDE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(_OUTSIDE[name]), name)
        return globals()[name]


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *__all__})
