"""The catalogue of quantities that one backward pass computes, each a class of a few rows."""

from packprop.extensions.averaged import HBP, KFRA
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
