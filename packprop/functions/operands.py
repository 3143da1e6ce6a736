"""What nodes of the autograd graph take beside the tensors that they are differentiated in: tables of names.

Such operands leave no edge on the graph, and may hold samples. Names stand as in ``functions/nodes.py``. A node
that is in no table may take anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from packprop.functions.entry import plain_options
from packprop.functions.nodes import (
    ELEMENTWISE,
    LINEAR,
    PIECEWISE,
    PRODUCTS,
    kind_of,
    name_of_node,
    names_of_nodes,
)

SUMS = names_of_nodes("Add Sub Rsub Stack Cat")
"""Sums of their inputs, or inputs side by side."""


ALIKE = names_of_nodes(
    "Stack MseLoss SmoothL1Loss HuberLoss KlDiv BinaryCrossEntropy BinaryCrossEntropyWithLogits"
)
"""Functions whose operands have one shape, to which they were expanded before."""


HIDING = names_of_nodes("Where MaskedFill Lerp NativeDropout")
"""Functions with an operand of which the graph shows nothing: a condition, a mask, a weight."""


ENTRY_BY_ENTRY = (
    ALIKE
    | HIDING
    | names_of_nodes(
        """
    Add Sub Rsub Mul Div Pow Maximum Minimum Fmax Fmin Addcmul Addcdiv Clamp ClampMin ClampMax Fmod Remainder
    Atan2 Hypot Copysign Xlogy SpecialXlog1Py Logaddexp Logaddexp2
    """
    )
)
"""Functions whose operands, broadcast against each other, are combined entry by entry."""


EXPANDING = names_of_nodes("Expand Repeat")
"""Functions that repeat entries along an axis, such as that of the samples."""


WITH_SUMMAND = names_of_nodes("Addmm Addbmm Baddbmm Addmv Addr")
"""Products to which something is added that they do not save."""


BY_DATA = names_of_nodes(
    "Index IndexSelect Gather Take TakeAlongDim MaskedSelect Embedding EmbeddingBag IndexAdd Scatter ScatterAdd"
)
"""Functions that take rows as indices or masks say."""


INDEXED = BY_DATA | names_of_nodes("SelectScatter SliceScatter")
"""Functions that take indices, or numbers in place of them."""


VECTORS = names_of_nodes("Mv Dot")
"""Products whose other operand is a vector that is summed over: nothing of it is left in the result."""


WHOLE = (
    ELEMENTWISE
    | LINEAR
    | PIECEWISE
    | PRODUCTS
    | ENTRY_BY_ENTRY
    | names_of_nodes(
        """
    Softmax LogSoftmax Logsumexp LinalgVectorNorm Norm LinalgSvd LinalgEigh LinalgDet LinalgSlogdet LinalgQr
    LinalgCholeskyEx LinalgInvEx LinalgSolveEx Std Var StdMean VarMean Prod Cumprod Logcumsumexp SpecialEntr
    SpecialNdtri Digamma Cdist Pdist Sgn Renorm WeightNormInterface ViewAsReal ViewAsComplex Real Imag Conj
    Angle
    """
    )
) - INDEXED
"""Functions that have an edge for each of their operands, but for ``HIDING`` ones."""


REARRANGING = names_of_nodes(
    """
    View UnsafeView ReshapeAlias Permute Transpose T Expand Repeat Slice Select Cat Stack Unbind Split
    SplitWithSizes Squeeze Unsqueeze Clone ToCopy Alias Flip Roll Diagonal Tril Triu Neg
    """
)
"""Functions of which each entry of the result is an entry of an operand, with either sign, or a constant."""


EXPONENTS = frozenset({"_saved_exponent", "_saved_ord", "_saved_p"})
"""Numbers that decide whether a function is linear."""


def is_linear(node: Node, dependent: Sequence[int]) -> bool:
    """Whether a node is linear in those of its inputs that vary, together and everywhere."""
    return kind_of(node, dependent) == "linear" and name_of_node(node) not in PIECEWISE


def has_kinks(node: Node) -> bool:
    """Whether a node is linear by parts: also the deviation of two numbers, which is their distance."""
    name = name_of_node(node)
    if name in ("LinalgVectorNorm", "Norm"):
        return any(isinstance(option, float) and math.isinf(option) for option in options_of(node))
    return name in PIECEWISE or name in ("Std", "StdMean")


def options_of(node: Node) -> Sequence[Any]:
    """What a node saved beside tensors: axes, places, exponents; no factors, which many loops change slowly."""
    return [plain_options(getattr(node, name), name in EXPONENTS) for name in _options_of_type(type(node))]


@functools.lru_cache(maxsize=1024)
def _options_of_type(kind: type) -> tuple[str, ...]:
    """Private names of what nodes of a type save that is no tensor: tensors have a raw form, too."""
    names = {name for name in dir(kind) if name.startswith("_saved_")}
    return tuple(sorted(name for name in names if f"_raw{name}" not in dir(kind)))


def saved_constants(node: Node) -> Iterator[Tensor]:
    """Tensors that a node saved and that were not differentiated."""
    return (tensor for tensor in saved_tensors(node) if not tensor.requires_grad)


def saved_tensors(node: Node) -> Iterator[Tensor]:
    """Tensors that a node saved.

    Autograd shows them under names of its own, one for each operand, as PyTorch's notes on it say.
    """
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        value = getattr(node, name)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor
