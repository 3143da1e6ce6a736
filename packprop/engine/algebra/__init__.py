"""Tensors in, tensors out: structures, their statistics, and the merging of results."""

from packprop.engine.algebra import kronecker
from packprop.engine.algebra.choices import algorithms
from packprop.engine.algebra.conjugate_gradients import ConjugateGradients, NotPositive
from packprop.engine.algebra.coupled import Coupled, coupled
from packprop.engine.algebra.decompositions import eigh, eigvalsh
from packprop.engine.algebra.factors import cotangent_gram, input_gram, input_sum, mean_product
from packprop.engine.algebra.joining import join
from packprop.engine.algebra.kronecker import Eigen
from packprop.engine.algebra.monoid import (
    ADD_IN_PLACE,
    CAT,
    KEEP,
    MOMENTS,
    SINGLE,
    SUM,
    Moments,
    Monoid,
    lift,
    nothing_like,
    rescale,
)
from packprop.engine.algebra.order import EntryOrder, Fold, fold_swapped, fold_to
from packprop.engine.algebra.projections import Projection, projected
from packprop.engine.algebra.statistics import (
    along,
    along_each,
    batch_sq,
    gram,
    moments,
    sq_norm,
    sum_sq,
    token_along,
    total_grad,
)
from packprop.engine.algebra.structures import Dense, Lookup, Structure, entry_order_of, rows

__all__ = [
    "ADD_IN_PLACE",
    "CAT",
    "KEEP",
    "MOMENTS",
    "SINGLE",
    "SUM",
    "ConjugateGradients",
    "Coupled",
    "Dense",
    "Eigen",
    "EntryOrder",
    "Fold",
    "Lookup",
    "Moments",
    "Monoid",
    "NotPositive",
    "Projection",
    "Structure",
    "algorithms",
    "along",
    "along_each",
    "batch_sq",
    "cotangent_gram",
    "coupled",
    "eigh",
    "eigvalsh",
    "entry_order_of",
    "fold_swapped",
    "fold_to",
    "gram",
    "input_gram",
    "input_sum",
    "join",
    "kronecker",
    "lift",
    "mean_product",
    "moments",
    "nothing_like",
    "projected",
    "rescale",
    "rows",
    "sq_norm",
    "sum_sq",
    "token_along",
    "total_grad",
]
