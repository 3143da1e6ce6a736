"""Second derivatives: their seed vectors, the routes to compute them, and products with them."""

from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.generic_loss import sample_losses
from packprop.engine.curvature.linear import (
    ASKED,
    INSTEAD,
    Product,
    Vectors,
    jvps,
    require_vectors,
    vjps,
    with_zeros,
)
from packprop.engine.curvature.matrices import Hessian
from packprop.engine.curvature.nonlinearities import residuals, shared_rows
from packprop.engine.curvature.operators import Operator, block_diagonal, chosen_parameters, ggn, hessian
from packprop.engine.curvature.products import Matrix, ggnvp, graph_product, hessian_product, shown, vjp
from packprop.engine.curvature.routes import Routes, choose_routes, kind_of_map
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    factors_on_losses,
    faulty_jacobian,
    require_passable,
    require_second_derivatives,
    warn_unless_finite,
)
from packprop.engine.curvature.seeds import columns
from packprop.engine.curvature.snapshots import snapshots_of
from packprop.engine.curvature.solving import Solution, indefinite, require_tolerance, solve, warn_of_residuals
from packprop.engine.curvature.spectra import (
    Eigenpairs,
    SpectralDensity,
    Trace,
    eigenvalues,
    spectral_density,
    trace,
)

__all__ = [
    "ASKED",
    "INSTEAD",
    "Columns",
    "Eigenpairs",
    "Hessian",
    "Matrix",
    "Operator",
    "Product",
    "Routes",
    "Solution",
    "SpectralDensity",
    "Trace",
    "Vectors",
    "block_diagonal",
    "choose_routes",
    "chosen_parameters",
    "columns",
    "differentiating_twice",
    "eigenvalues",
    "factors_on_losses",
    "faulty_jacobian",
    "ggn",
    "ggnvp",
    "graph_product",
    "hessian",
    "hessian_product",
    "indefinite",
    "jvps",
    "kind_of_map",
    "require_passable",
    "require_second_derivatives",
    "require_tolerance",
    "require_vectors",
    "residuals",
    "sample_losses",
    "shared_rows",
    "shown",
    "snapshots_of",
    "solve",
    "spectral_density",
    "trace",
    "vjp",
    "vjps",
    "warn_of_residuals",
    "warn_unless_finite",
    "with_zeros",
]
