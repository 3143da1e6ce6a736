"""Tables of the nodes of the autograd graph by name, with their kinds of second derivatives.

The tables leave out the number that autograd appends to a name. A node in no table counts as nonlinear and not
elementwise, which costs time but is always right.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

Kind = Literal["linear", "elementwise", "nonlinear"]
"""The curvature of a node: none, entry by entry, or any other."""


def names_of_nodes(text: str) -> frozenset[str]:
    """Split a text into names of nodes, given without their common suffix."""
    return frozenset(text.split())


LINEAR = names_of_nodes("""
    Add Sub Rsub Neg Sum Mean View UnsafeView ReshapeAlias Permute Transpose T Expand Slice Select Cat Stack
    Unbind Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Squeeze Unsqueeze Index IndexSelect Gather
    Take MaskedSelect ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D
    ReplicationPad2D ReplicationPad3D Clone ToCopy Alias AsStrided AvgPool2D AvgPool3D AdaptiveAvgPool2D
    AdaptiveAvgPool3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
    UpsampleNearestExact2D UpsampleNearestExact3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D
    UpsampleTrilinear3D Cumsum MaskedFill Where Repeat Roll Flip Diagonal PixelShuffle PixelUnshuffle
    ChannelShuffle Unfold Im2Col Col2Im Trace Tril Triu NativeDropout IndexAdd Scatter ScatterAdd
    SelectScatter SliceScatter NanToNum HandedOn
""")
"""Linear in all inputs together."""

REDUCING = names_of_nodes("ScatterReduce IndexReduce SegmentReduce")
"""Functions that reduce entries by a sum, a mean or another operation, which they saved as ``reduce``."""

PIECEWISE = names_of_nodes("""
    Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax Maximum
    Minimum Fmax Fmin Max Min Amax Amin MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D
    AdaptiveMaxPool3D FractionalMaxPool2D FractionalMaxPool3D RreluWithNoise Sort Topk Kthvalue Median Cummax
    Cummin Aminmax Sign Floor Ceil Round Trunc
""")
"""Linear in all inputs together at every point where they are differentiable."""

CONVOLUTIONS = names_of_nodes(
    "Convolution ConvolutionOverrideable CudnnConvolution MkldnnConvolution MiopenConvolution"
)

PRODUCTS = CONVOLUTIONS | names_of_nodes(
    "Mul Mm Bmm Addmm Addbmm Baddbmm Addmv Addr Mv Dot Addcmul Trilinear Linear Lerp PreluKernel"
)
"""Linear in each input, with the others fixed."""

ELEMENTWISE = names_of_nodes("""
    Sigmoid Tanh Gelu Silu Softplus Elu Celu Mish LogSigmoid Exp Exp2 Expm1 Log Log2 Log10 Log1P Sqrt Rsqrt
    Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Erf Erfc Erfinv Pow Reciprocal Hardswish Logit
    Lgamma Sinc
""")
"""Smooth functions of one input, entry by entry."""

ENTRYWISE = ELEMENTWISE | names_of_nodes(
    "Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax"
)
"""Functions of one input, entry by entry, smooth or not."""

MASKS = ENTRYWISE | names_of_nodes("""
    Where MaskedFill Maximum Minimum Fmax Fmin RreluWithNoise PreluKernel Nextafter Xlogy SpecialXlog1Py
""")
"""Entrywise functions whose values may make an entry independent of its inputs."""

SELECTING = names_of_nodes(
    "Max Min Median Nanmedian Mode Kthvalue Cummax Cummin Sort Topk Logcumsumexp Prod Cumprod"
)
"""Functions that may drop entries by their values, along an axis that they saved as ``dim``, or among all."""

POOLS = {
    f"{kind}MaxPool{n}D{end}": n for n in (2, 3) for kind, end in (("", "WithIndices"), ("Adaptive", ""))
} | {f"FractionalMaxPool{n}D": n for n in (2, 3)}
"""Pools that select entries by their values -> the number of axes that they pool, which are the last."""

WRONG_IN_COLUMNS = names_of_nodes("NativeGroupNorm")
"""Functions whose second derivatives are wrong for many columns at once if three extents are equal."""

WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"
"""The node of a function without a derivative, such as a dynamically quantised layer: PyTorch uses zero."""

WITHOUT_DATA = names_of_nodes("Sgn")
"""Nodes whose derivative is a tensor of zeros without data, which few other nodes expect.

Seen on torch 2.13: the backward pass of group norm reads uninitialised memory in place of the zeros, and the
second derivatives of other normalisations and of some losses raise an error. Of all functions that PyTorch
tests, only this node makes such zeros, as the second derivative of an absolute value, an L1 loss, or a norm.
"""

DIFFERENTIABLE_ONCE = names_of_nodes("Hardsigmoid")
"""Piecewise linear functions of ``ENTRYWISE`` whose backward pass PyTorch cannot differentiate."""

RESHAPES = names_of_nodes("View UnsafeView ReshapeAlias Squeeze Unsqueeze Clone Alias HandedOn")
"""Functions that keep all entries in the same order."""

NORMALISATIONS = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})
"""Linear in the first input if they take their statistics from buffers, nonlinear otherwise."""

SCALING = NORMALISATIONS | {"NativeLayerNorm", "NativeGroupNorm"}
"""Normalisations with a scale and a shift as their second and third inputs."""

IDENTITIES = {
    "BackwardHookFunctionBackward": "torch.nn.modules._functions.BackwardHookFunction",
    "_DDPSinkBackward": "torch.nn.parallel.distributed._DDPSink",
    "RegisterPostBackwardFunctionBackward": (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"
    ),
}
"""PyTorch's own nodes, written in Python, that pass gradients on unchanged, and the functions behind them.

The first is at the inputs and outputs of modules with full backward hooks, which run after it. The second is at
the outputs of ``DistributedDataParallel(static_graph=True)``: the first gradient through it starts the exchange
between processes. The third is at the inputs of modules with ``fully_shard``: it exchanges their gradients. No
public interface tells these private nodes from a user's function; only this table names them.
"""

DOERS: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("_DDPSinkBackward", "RegisterPostBackwardFunctionBackward"), lambda *cotangents: (None, *cotangents)
)
"""Identities with a side effect, each with a function that passes gradients on without it."""


def function_of(node: Node) -> Any:
    """Return the class of the function behind a node that is written in Python; it has no public name."""
    kind: Any = type(node)
    return kind._forward_cls


def is_identity(node: Node) -> bool:
    """Tell whether a node is one of ``IDENTITIES``, and not a user's own of the same name."""
    if node.name() not in IDENTITIES or not isinstance(node, BackwardCFunction):
        return False
    function = function_of(node)
    return f"{function.__module__}.{function.__qualname__}" == IDENTITIES[node.name()]


def is_from_outside(node: Node) -> bool:
    """Tell whether a function is not PyTorch's own: in Python, or in C++ without a class (scripted regions)."""
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def is_change_of_view(node: Node) -> bool:
    """Tell whether a node changed a tensor in place through a view; its first input is the old tensor."""
    return node.name().endswith("CopySlices")


def name_of_node(node: Node) -> str:
    """Return the name of a node in the tables; a user's function, which may have any name, gets ``own``."""
    name = node.name()
    short = short_name(name)
    if short == name and isinstance(node, BackwardCFunction):  # PyTorch's own names have a suffix
        return "HandedOn" if is_identity(node) else f"own {name}"
    return short


@functools.lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """Return the name of one of PyTorch's own nodes without their common suffix."""
    return re.sub(r"Backward\d+$", "", name)


def kind_of(node: Node, dependent: Sequence[int], complex_numbers: bool = False) -> Kind:
    """Return the kind of curvature of a node in some of its inputs, given by their places.

    Functions that are elementwise or piecewise linear for real numbers may couple the real and imaginary parts
    of ``complex_numbers``, as an absolute value does.
    """
    name = name_of_node(node)
    if name in LINEAR or (name in PIECEWISE and not complex_numbers):
        return "linear"
    if name in REDUCING and saved_option(node, "reduce") in ("sum", "mean"):
        return "linear"
    alone = len(dependent) == 1
    if name in PRODUCTS and alone:
        return "linear"
    if complex_numbers:
        return "nonlinear"
    if (name == "Div" or name in NORMALISATIONS) and list(dependent) == [0]:
        return "linear" if name == "Div" or _uses_running_statistics(node) else "nonlinear"
    inputs = [upstream for upstream, _ in node.next_functions if upstream is not None]
    if name in ELEMENTWISE and alone and len(inputs) == 1:
        return "elementwise"
    return "nonlinear"


def _uses_running_statistics(node: Node) -> bool:
    """Tell whether a batch normalisation took its statistics from buffers; its flag has no public name."""
    return hasattr(node, "_saved_training") and node._saved_training is False


def number_of_node(node: Any) -> int:
    """Return the place of a node in the order in which its thread has made nodes.

    The number is private (``Node._sequence_nr``); nothing public tells which of two nodes is older.
    """
    return int(node._sequence_nr())


outputs_of: Callable[[Node], Sequence[Any]] = operator.attrgetter("_input_metadata")
"""Returns shape, dtype and device of each output of a node; nothing public tells them."""


def made_by(node: Any) -> list[Any]:
    """Return objects with shape, dtype and device of each output of a node; for a leaf's node, the leaf."""
    leaf = getattr(node, "variable", None)
    return list(outputs_of(node)) if leaf is None else [leaf]


def has_option(node: Node, name: str) -> bool:
    """Tell whether a node has saved a value of this name."""
    return hasattr(node, f"_saved_{name}")


def saved_option(node: Node, name: str) -> Any:
    """Return a saved value that is not a tensor, such as ``dim``; autograd shows negative numbers unsigned."""
    value = getattr(node, f"_saved_{name}")
    return type(value)(map(_signed, value)) if type(value) in (list, tuple) else _signed(value)


def is_rounded(node: Node) -> bool:
    """Tell whether a node is a quotient that was rounded: its derivative is zero."""
    return has_option(node, "rounding_mode") and saved_option(node, "rounding_mode") is not None


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def is_wrong_in_third_order(node: Node) -> bool:
    """Tell whether torch's third derivative of a node is silently wrong.

    Seen on torch 2.13 for layer norm, and for batch norm with statistics of the batch, including instance norm.
    """
    name = name_of_node(node)
    return name == "NativeLayerNorm" or (name in NORMALISATIONS and not _uses_running_statistics(node))


def is_wrong_in_second_order(node: Node) -> bool:
    """Tell whether torch's second derivative of a node is silently wrong.

    Seen on torch 2.13 for the fused normalisation of weights, and for tables that divide gradients by counts:
    their Hessians are not even symmetric.
    """
    name = name_of_node(node)
    counts = name in ("Embedding", "EmbeddingBag") and bool(saved_option(node, "scale_grad_by_freq"))
    return name == "WeightNormInterface" or counts


def bias_without_weight(node: Node) -> Node | None:
    """Return the node of the bias of a normalisation without a weight; ``None`` for any other node.

    Seen on torch 2.13: the second derivative of such a node through the bias is zero without any error, or
    raises. A weight that is not trained has no edge either; the node's saved weight tells the two cases apart.
    """
    if name_of_node(node) not in SCALING:
        return None
    edges = node.next_functions
    if len(edges) < 3 or edges[1][0] is not None or edges[2][0] is None:
        return None
    return edges[2][0] if getattr(node, "_saved_weight", None) is None else None


WITHOUT_SECOND_DERIVATIVE = ("GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked",)
"""Prefixes of the names of PyTorch's own nodes whose second derivative is zero, without any error.

Seen on torch 2.13: ``linear_cross_entropy`` with ``options`` computes the gradient in its forward pass, or from
detached inputs in its backward pass. No public interface tells these nodes from those of a library.
"""


def is_without_second_derivative(node: Node) -> bool:
    """Tell whether a node is one of ``WITHOUT_SECOND_DERIVATIVE``."""
    return isinstance(node, BackwardCFunction) and node.name().startswith(WITHOUT_SECOND_DERIVATIVE)


def is_once_differentiable(node: Node) -> bool:
    """Tell whether a node is a user's function with the mark ``once_differentiable``, or a similar kernel.

    The graph of such a derivative does not lead to the inputs. If you differentiate it in them, PyTorch raises
    no error, but returns ``None``, which means zero for any other function. The wrapper that the mark puts
    around a backward pass is known by its source file.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    if is_without_second_derivative(node):
        return True
    backward = getattr(function_of(node), "backward", None)
    return getattr(backward, "__globals__", None) is vars(torch.autograd.function)


def readable_name(node: Any) -> str:
    """Return the function that made a node, as users know it, or the node's own name."""
    name = name_of_node(node)
    if name == "Convolution":
        kind = "conv_transpose" if saved_option(node, "transposed") else "conv"
        return f"{kind}{len(made_by(node)[0].shape) - 2}d"
    return READABLE_NAMES.get(name) or str(node.name())


READABLE_NAMES: dict[str, str] = {
    "Addmm": "linear",
    "Linear": "linear",
    "Mm": "matmul",
    "Bmm": "bmm",
    "NativeLayerNorm": "layer_norm",
    "NativeGroupNorm": "group_norm",
    **dict.fromkeys(NORMALISATIONS, "batch_norm"),
    "Embedding": "embedding",
    "Mul": "mul",
    "Add": "add",
    "Sub": "sub",
    "Div": "div",
    "Expand": "expand",
    "PreluKernel": "prelu",
    "Baddbmm": "baddbmm",
    "Rsub": "rsub",
    "FusedRmsNorm": "rms_norm",
    "GroupedMm": "grouped_mm",
    "EmbeddingBag": "embedding_bag",
    "IndexSelect": "index_select",
    "MkldnnRnnLayer": "lstm",
    "CudnnRnn": "recurrent layer",
    "MiopenRnn": "recurrent layer",
    "Trilinear": "bilinear",
    "Mv": "mv",
}
"""Names of nodes -> the functions that made them, as users know them."""
