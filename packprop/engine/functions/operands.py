"""Tables of nodes, by operands that the graph does not show because they are not differentiated.

Such an operand has no edge on the graph, but may hold samples. A node in no table may have any operands.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.engine.functions.entry import plain_options
from packprop.engine.functions.nodes import (
    ELEMENTWISE,
    LINEAR,
    PIECEWISE,
    PRODUCTS,
    function_of,
    has_option,
    kind_of,
    made_by,
    name_of_node,
    names_of_nodes,
    saved_option,
)
from packprop.engine.functions.saved import keeps_elsewhere, raw_names

SUMS = names_of_nodes("Add Sub Rsub Stack Cat")
"""Sums of the inputs, or their concatenation."""

ALIKE = names_of_nodes(
    "Stack MseLoss SmoothL1Loss HuberLoss KlDiv BinaryCrossEntropy BinaryCrossEntropyWithLogits"
)
"""Functions whose operands have the same shape; an earlier node has expanded them to it."""

HIDING = names_of_nodes("Where MaskedFill Lerp NativeDropout")
"""Functions with an operand that the graph does not show: a condition, a mask, a weight."""

ENTRY_BY_ENTRY = names_of_nodes("""
    Add Sub Rsub Mul Div Pow Maximum Minimum Fmax Fmin Addcmul Addcdiv Clamp ClampMin ClampMax Fmod Remainder
    Atan2 Hypot Copysign Xlogy SpecialXlog1Py Logaddexp Logaddexp2
""").union(ALIKE, HIDING)
"""Functions that broadcast their operands against each other, and combine them entry by entry."""

EXPANDING = names_of_nodes("Expand Repeat")
"""Functions that repeat entries along an axis, such as that of the samples."""

WITH_SUMMAND = names_of_nodes("Addmm Addbmm Baddbmm Addmv Addr")
"""Products with a summand that they do not save."""

BY_DATA = names_of_nodes(
    "Index IndexSelect Gather Take TakeAlongDim MaskedSelect Embedding EmbeddingBag IndexAdd Scatter ScatterAdd"
)
"""Functions that select rows by indices or masks."""

INDEXED = BY_DATA | names_of_nodes("SelectScatter SliceScatter")
"""Functions with indices as operands, or with numbers in place of indices."""

VECTORS = names_of_nodes("Mv Dot")
"""Products that sum over the axis of a vector, so the shape of the result does not show this axis."""

WHOLE = (
    names_of_nodes("""
    Softmax LogSoftmax Logsumexp LinalgVectorNorm Norm LinalgSvd LinalgEigh LinalgDet LinalgSlogdet LinalgQr
    LinalgCholeskyEx LinalgInvEx LinalgSolveEx Std Var StdMean VarMean Prod Cumprod Logcumsumexp SpecialEntr
    SpecialNdtri Digamma Cdist Pdist Sgn Renorm WeightNormInterface ViewAsReal ViewAsComplex Real Imag Conj
    Angle
""")
    .union(ELEMENTWISE, LINEAR, PIECEWISE, PRODUCTS, ENTRY_BY_ENTRY)
    .difference(INDEXED)
)
"""Functions with an edge for each operand, except operands of ``HIDING`` functions."""

REARRANGING = names_of_nodes("""
    View UnsafeView ReshapeAlias Permute Transpose T Expand Repeat Slice Select Cat Stack Unbind Split
    SplitWithSizes Squeeze Unsqueeze Clone ToCopy Alias Flip Roll Diagonal Tril Triu Neg
""")
"""Functions whose result has entries of operands, with either sign, or constants."""

EXPONENTS = frozenset({"_saved_exponent", "_saved_ord", "_saved_p"})
"""Numbers that decide whether a function is linear."""

CURVED = names_of_nodes("""
    Nansum IndexPut IndexPutImpl ViewAsReal ViewAsComplex Real Imag Conj Complex FftC2C FftR2C FftC2R
    Vdot SparseAddmm Div Addcdiv MseLoss SoftMarginLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits
    NllLoss NllLoss2D KlDiv
""").union(ELEMENTWISE - names_of_nodes("Softplus Elu Celu Hardswish Logit"), PRODUCTS - {"PreluKernel"})
"""Functions whose second derivatives tell which entries meet in them; other functions may have kinks."""

NORMS = names_of_nodes("LinalgVectorNorm Norm Dist")
"""Functions that save their exponent."""


def is_linear(node: Node, dependent: Sequence[int]) -> bool:
    """Tell whether a node is linear in some of its inputs, together and everywhere."""
    name = name_of_node(node)
    return kind_of(node, dependent) == "linear" and name not in PIECEWISE and name != "PreluKernel"


def has_kinks(node: Node, dependent: Sequence[int]) -> bool:
    """Tell whether a node may be linear in pieces but not everywhere, as all norms of one number are.

    A power with a tensor as its exponent may be linear: it is where the exponent is one or zero.
    """
    name = name_of_node(node)
    if name == "Pow" and "_raw_saved_exponent" in raw_names(type(node)):
        return True
    if name in NORMS and _exponent(node) == 2:
        above, output = node.next_functions[dependent[0]]
        return torch.Size(made_by(above)[output].shape).numel() == torch.Size(made_by(node)[0].shape).numel()
    return name not in CURVED and not is_linear(node, dependent)


def adds_up_entries(node: Node, dependent: Sequence[int]) -> bool:
    """Tell whether a node adds up a function of each entry, as the norm with exponent 1 does."""
    name = name_of_node(node)
    adds = name in ("SmoothL1Loss", "HuberLoss") or (name in NORMS and _exponent(node) == 1)
    return adds and len(dependent) == 1


def is_norm_without_nan(node: Node) -> bool:
    """Tell whether a norm that is zero drops even NaN: norms with exponents 1, 2 and infinity do not."""
    return name_of_node(node) in NORMS and _exponent(node) not in (1.0, 2.0, math.inf)


def _exponent(node: Node) -> float:
    """Return the exponent of a node of ``NORMS``."""
    name = "ord" if has_option(node, "ord") else "p"
    value = saved_option(node, name) if has_option(node, name) else None
    return 2.0 if value is None else float(value)


def options_of(node: Node) -> Sequence[Any]:
    """Return a node's saved axes, places and exponents, without factors, which many loops change slowly."""
    names = numbers_of_type(type(node))
    return [plain_options(getattr(node, name), name in EXPONENTS) for name in names if "_sym_" not in name]


def extents_of(node: Node) -> Sequence[Any]:
    """Return the saved extents of a node, which vary with the batch."""
    return [plain_options(getattr(node, name)) for name in numbers_of_type(type(node)) if "_sym_" in name]


def facts_of(node: Any) -> list[Any]:
    """Return what a node has saved: its options, also those of a user's function, and the shapes of tensors.

    The shapes are left out in a checkpoint, which would have to run again, and once the graph is freed.
    """
    found = [*options_of(node), *extents_of(node), own_options(node)]
    if not keeps_elsewhere(node):
        with contextlib.suppress(RuntimeError):
            given = node.saved_tensors if isinstance(node, BackwardCFunction) else saved_tensors(node)
            found += [None if each is None else (*each.shape, each.dtype) for each in given]
    return found


def own_options(node: Node) -> Any:
    """Return the class of a user's own function and the options on its ``ctx``; ``None`` for other nodes."""
    if not isinstance(node, BackwardCFunction):
        return None
    function = function_of(node)
    kept = tuple((key, option_of(value)) for key, value in sorted(vars(node).items()))
    return function.__module__, function.__qualname__, kept


def option_of(value: Any) -> Any:
    """Return a number, text, precision or device as it is, and the class of any other value.

    Floats are factors, which many loops change slowly. Only 0, 1 and -1 count: functions compare with these,
    and a rule that forgets a factor shows no fault at 1. Lists become tuples, entry by entry.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(option_of, value))
    is_asked_for = isinstance(value, float) and value in (-1.0, 0.0, 1.0)
    is_plain = is_asked_for or isinstance(value, (int, str, torch.dtype, torch.device))
    return value if is_plain else type(value)


@functools.lru_cache(maxsize=1024)
def numbers_of_type(kind: type) -> tuple[str, ...]:
    """Return the names under which a type of node shows its saved options, and extents ("sym" in the name).

    Saved tensors are left out: they also have a raw form.
    """
    shown = dir(kind)
    return tuple(name for name in shown if name.startswith("_saved_") and f"_raw{name}" not in shown)


def saved_constants(node: Node) -> list[Tensor]:
    """Return the saved tensors of a node that do not require a gradient."""
    return [tensor for tensor in saved_tensors(node) if not tensor.requires_grad]


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the saved tensors of a node, which autograd shows under a name for each operand."""
    found: list[Tensor] = []
    for name in raw_names(type(node)):
        value = getattr(node, name.removeprefix("_raw"), None)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            found.append(tensor)
    return found


MATRIX_PRODUCTS = {
    "Mm": ("_saved_self", "_saved_mat2"),
    "Addmm": ("_saved_mat1", "_saved_mat2"),
    "Bmm": ("_saved_self",),
    "Mv": ("_saved_self",),
}
"""Products of matrices -> the operands that their nodes have saved; a constant operand may be sparse."""


def takes_sparse(node: Node) -> bool:
    """Tell whether a product of matrices took a sparse constant.

    In a checkpoint, which would have to run again, its matrices count as dense.
    """
    names = MATRIX_PRODUCTS.get(name_of_node(node), ())
    if not names or None not in [above for above, _ in node.next_functions] or keeps_elsewhere(node):
        return False
    return any(is_sparse(getattr(node, name, None)) for name in names)


def is_mask(index: Tensor) -> bool:
    """Tell whether an index is a mask, for which PyTorch takes bytes as well."""
    return index.dtype in (torch.bool, torch.uint8)


def is_sparse(value: Any) -> bool:
    """Tell whether a value is a tensor in a sparse layout."""
    return isinstance(value, Tensor) and value.layout is not torch.strided
