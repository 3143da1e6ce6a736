"""What second derivatives the nodes of the autograd graph have: tables of their names.

Names stand without the number that autograd appends. A node that is in no table counts as nonlinear and not
elementwise, which costs time but is always right.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

Kind = Literal["linear", "elementwise", "nonlinear"]
"""How a node curves: not at all, entry by entry, or in any other way."""


def names_of_nodes(text: str) -> frozenset[str]:
    """Names of nodes without what they all end in."""
    return frozenset(text.split())


LINEAR = names_of_nodes(
    """
    Add Sub Rsub Neg Sum Mean View UnsafeView ReshapeAlias Permute Transpose T Expand Slice Select Cat Stack
    Unbind Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Squeeze Unsqueeze Index IndexSelect Gather
    Take MaskedSelect ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D
    ReplicationPad2D ReplicationPad3D Clone ToCopy Alias AsStrided AvgPool2D AvgPool3D AdaptiveAvgPool2D
    AdaptiveAvgPool3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
    UpsampleNearestExact2D UpsampleNearestExact3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D
    UpsampleTrilinear3D Cumsum MaskedFill Where Repeat Roll Flip Diagonal PixelShuffle PixelUnshuffle
    ChannelShuffle Unfold Im2Col Col2Im Trace Tril Triu NativeDropout IndexAdd Scatter ScatterAdd
    SelectScatter SliceScatter HandedOn
    """
)
"""Linear in all inputs together."""


PIECEWISE = names_of_nodes(
    """
    Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax Maximum
    Minimum Fmax Fmin Max Min Amax Amin MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D
    AdaptiveMaxPool3D FractionalMaxPool2D FractionalMaxPool3D RreluWithNoise Sort Topk Kthvalue Median Cummax
    Cummin Sign Floor Ceil Round Trunc
    """
)
"""Linear in all inputs together wherever they are differentiable."""


CONVOLUTIONS = names_of_nodes(
    "Convolution ConvolutionOverrideable CudnnConvolution MkldnnConvolution MiopenConvolution"
)


PRODUCTS = CONVOLUTIONS | names_of_nodes(
    "Mul Mm Bmm Addmm Addbmm Baddbmm Addmv Addr Mv Dot Addcmul Trilinear Linear Lerp PreluKernel"
)
"""Linear in each input, with the others fixed."""


ELEMENTWISE = names_of_nodes(
    """
    Sigmoid Tanh Gelu Silu Softplus Elu Celu Mish LogSigmoid Exp Exp2 Expm1 Log Log2 Log10 Log1P Sqrt Rsqrt
    Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Erf Erfc Erfinv Pow Reciprocal Hardswish Logit
    Lgamma Sinc
    """
)
"""Smooth functions of one input, entry by entry."""


ENTRYWISE = ELEMENTWISE | names_of_nodes(
    "Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax"
)
"""Functions of one input, entry by entry, smooth or not."""


MASKS = ENTRYWISE | names_of_nodes("Where MaskedFill Maximum Minimum Fmax Fmin RreluWithNoise")
"""Functions, entry by entry, whose values may keep an entry from its inputs."""


WRONG_IN_COLUMNS = names_of_nodes("NativeGroupNorm")
"""Functions whose second derivatives are wrong for many columns at once, where three extents are equal."""


WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"
"""The node of a function that PyTorch has no derivative for, such as a layer that is quantised as it runs.

PyTorch warns, and goes on as if the derivative were zero.
"""


WITHOUT_DATA = names_of_nodes("Sgn")
"""Nodes whose derivative is a tensor of zeros that holds no data, which few other nodes expect.

Seen on torch 2.13: the backward pass of group norm reads memory that nobody has written in its place, and the
second derivatives of other normalisations and of some losses raise. Of all functions that PyTorch tests, this
node alone makes such zeros: as the second derivative of an absolute value, an L1 loss, or a norm.
"""


DIFFERENTIABLE_ONCE = names_of_nodes("Hardsigmoid")
"""Functions of ``ENTRYWISE``, linear by parts, whose backward pass PyTorch cannot differentiate."""


RESHAPES = names_of_nodes("View UnsafeView ReshapeAlias Squeeze Unsqueeze Clone Alias HandedOn")
"""The same entries in the same order."""


NORMALISATIONS = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})
"""Linear in the first input if they take their statistics from buffers, nonlinear otherwise."""


IDENTITIES = {
    "BackwardHookFunctionBackward": "torch.nn.modules._functions.BackwardHookFunction",
    "_DDPSinkBackward": "torch.nn.parallel.distributed._DDPSink",
    "RegisterPostBackwardFunctionBackward": (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"
    ),
}
"""Nodes of PyTorch's own, written in Python, that hand gradients on as they are, and the functions behind them.

The first stands at the inputs and outputs of modules with full backward hooks, which run after it. The second
stands at the outputs of ``DistributedDataParallel(static_graph=True)``: the first gradient that comes through
it starts the exchange between processes. The third stands at the inputs of modules that ``fully_shard`` was
called on: it exchanges their gradients. All are private, and known here alone by name: they are neither
nonlinear nor a user's own, and nothing public tells them apart from those.
"""


DOERS: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("_DDPSinkBackward", "RegisterPostBackwardFunctionBackward"), lambda *cotangents: (None, *cotangents)
)
"""Those that do something else besides, each with what hands gradients on in its place."""


def function_of(node: Node) -> Any:
    """The class of the function behind a node that is written in Python: this has no public name."""
    kind: Any = type(node)
    return kind._forward_cls


def is_identity(node: Node) -> bool:
    """Whether a node is one of ``IDENTITIES``, and no user's own of the same name."""
    if node.name() not in IDENTITIES or not isinstance(node, BackwardCFunction):
        return False
    function = function_of(node)
    return f"{function.__module__}.{function.__qualname__}" == IDENTITIES[node.name()]


def is_change_of_view(node: Node) -> bool:
    """Whether a tensor was changed in place through a view: what it was before comes first upstream."""
    return node.name().endswith("CopySlices")


def name_of_node(node: Node) -> str:
    """The name of a node as in the tables; a user's own function, which may have any name, is marked as own."""
    if isinstance(node, BackwardCFunction):
        if is_identity(node):
            return "HandedOn"
        return f"own {node.name()}"
    return short_name(node.name())


@functools.lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The name of a node of PyTorch's own without what they all end in."""
    return re.sub(r"Backward\d+$", "", name)


def kind_of(node: Node, dependent: Sequence[int], complex_numbers: bool = False) -> Kind:
    """How a node curves in those of its inputs that vary.

    Args:
        node: The node.
        dependent: Places of the inputs that vary among its ``next_functions``.
        complex_numbers: Whether it takes or makes complex numbers. What real functions do entry by entry, or
            linearly by parts, couples real and imaginary parts there, as an absolute value does.
    """
    name = name_of_node(node)
    if name in LINEAR or (name in PIECEWISE and not complex_numbers):
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
    """Whether a batch normalisation has taken its statistics from buffers.

    The flag that it saved has no public name; a node without the flag counts as nonlinear.
    """
    return hasattr(node, "_saved_training") and node._saved_training is False


def made_by(node: Any) -> list[Any]:
    """Shape, dtype and device of each tensor that a node made; the leaf that a node stands for.

    This reads a private attribute of autograd nodes: no public one says how many outputs there are.
    """
    leaf = getattr(node, "variable", None)
    return list(node._input_metadata) if leaf is None else [leaf]


def axis_of_rows(node: Node, axes: int) -> int:
    """The axis, of so many, along which a softmax took entries together."""
    return int(saved_option(node, "dim")) % axes


def saved_option(node: Node, name: str) -> Any:
    """What a node saved beside tensors under a name, such as ``dim``; autograd shows numbers without a sign."""
    value = getattr(node, f"_saved_{name}")
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def is_wrong_in_third_order(node: Node) -> bool:
    """Whether torch's third derivative of a node is wrong, without any error.

    Seen on torch 2.13 for layer norm, and for batch norm by statistics of the batch, instance norm included.
    """
    name = name_of_node(node)
    return name == "NativeLayerNorm" or (name in NORMALISATIONS and not _uses_running_statistics(node))


def is_wrong_in_second_order(node: Node) -> bool:
    """Whether torch's second derivative of a node is wrong, without any error.

    Seen on torch 2.13 for the fused normalisation of weights: its Hessian is not even symmetric.
    """
    return name_of_node(node) == "WeightNormInterface"


def bias_without_weight(node: Node) -> Node | None:
    """Where the bias of a normalisation without a weight comes from; ``None`` for any other node.

    Seen on torch 2.13: the second derivative of such a node loses what comes through the bias: zero without any
    error, or an error about an undefined tensor. A weight that is not trained has no edge either; the one that
    the node has saved has no public name.
    """
    if name_of_node(node) not in (NORMALISATIONS | {"NativeLayerNorm", "NativeGroupNorm"}):
        return None
    edges = node.next_functions
    if len(edges) < 3 or edges[1][0] is not None or edges[2][0] is None:
        return None
    return edges[2][0] if getattr(node, "_saved_weight", None) is None else None


WITHOUT_SECOND_DERIVATIVE = ("GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked",)
"""How the names begin of nodes of PyTorch's own whose second derivative counts as zero, without any error.

Seen on torch 2.13: ``linear_cross_entropy`` with ``options`` takes the gradient in its forward pass, or from
detached inputs in its backward pass. Nothing public tells these nodes from others that a library registered.
"""


def is_without_second_derivative(node: Node) -> bool:
    """Whether a node is one of ``WITHOUT_SECOND_DERIVATIVE``."""
    return isinstance(node, BackwardCFunction) and node.name().startswith(WITHOUT_SECOND_DERIVATIVE)


def is_once_differentiable(node: Node) -> bool:
    """Whether a node is a user's function marked as ``once_differentiable``, or a kernel that counts as one.

    The graph of such a derivative does not lead to the inputs. If it is differentiated in them, PyTorch raises
    no error but returns ``None``, which means zero everywhere else. The class behind a node has no public name;
    the wrapper that the mark puts around its backward pass is recognised by the file that it comes from.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    if is_without_second_derivative(node):
        return True
    backward = getattr(function_of(node), "backward", None)
    return getattr(backward, "__globals__", None) is vars(torch.autograd.function)
