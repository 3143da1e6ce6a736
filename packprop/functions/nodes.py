"""What second derivatives the nodes of the autograd graph have: a table of their names.

Names are without the number that autograd puts behind them. What is not in a table is taken for nonlinear and
not elementwise, which costs time but is always right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

Kind = Literal["linear", "elementwise", "nonlinear"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LINEAR = _names(
    """
    Add Sub Rsub Neg Sum Mean View UnsafeView ReshapeAlias Permute Transpose T Expand Slice Select Cat Stack
    Unbind Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Squeeze Unsqueeze Index IndexSelect Gather
    Take MaskedSelect ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D
    ReplicationPad2D ReplicationPad3D Clone ToCopy Alias AsStrided AvgPool2D AvgPool3D AdaptiveAvgPool2D
    AdaptiveAvgPool3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
    UpsampleNearestExact2D UpsampleNearestExact3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D
    UpsampleTrilinear3D Cumsum MaskedFill Where Repeat Roll Flip Diagonal PixelShuffle PixelUnshuffle
    ChannelShuffle Unfold Im2Col Col2Im Trace Tril Triu NativeDropout IndexAdd Scatter ScatterAdd
    SelectScatter SliceScatter
    """
)
"""Linear in all inputs together."""


PIECEWISE = _names(
    """
    Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax Maximum
    Minimum Fmax Fmin Max Min Amax Amin MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D
    AdaptiveMaxPool3D FractionalMaxPool2D FractionalMaxPool3D RreluWithNoise Sort Topk Kthvalue Median Cummax
    Cummin Sign Floor Ceil Round Trunc
    """
)
"""Linear in all inputs together wherever they are differentiable."""


CONVOLUTIONS = _names(
    "Convolution ConvolutionOverrideable CudnnConvolution MkldnnConvolution MiopenConvolution"
)


PRODUCTS = CONVOLUTIONS | _names(
    "Mul Mm Bmm Addmm Addbmm Baddbmm Addmv Addr Mv Dot Addcmul Trilinear Linear Lerp PreluKernel"
)
"""Linear in every single input, as long as the others are held."""


ELEMENTWISE = _names(
    """
    Sigmoid Tanh Gelu Silu Softplus Elu Celu Mish LogSigmoid Exp Exp2 Expm1 Log Log2 Log10 Log1P Sqrt Rsqrt
    Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh Erf Erfc Erfinv Pow Reciprocal Hardswish Logit
    Lgamma Sinc
    """
)
"""Smooth functions of one input, entry by entry."""


ENTRYWISE = ELEMENTWISE | _names(
    "Relu LeakyRelu Threshold Hardtanh Hardshrink Softshrink Hardsigmoid Abs Clamp ClampMin ClampMax"
)
"""Functions of one input, entry by entry, smooth or not."""


RESHAPES = _names("View UnsafeView ReshapeAlias Squeeze Unsqueeze Clone Alias")
"""The same entries in the same order."""


NORMALISATIONS = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})


def name_of_node(node: Node) -> str:
    """Its name, as the tables have it; that of a user's own function, which may be any, is left as it is."""
    if isinstance(node, BackwardCFunction):
        return f"own {node.name()}"
    return re.sub(r"Backward\d+$", "", node.name())


def kind_of(node: Node, dependent: Sequence[int]) -> Kind:
    """How a node curves in those of its inputs that depend on what is varied.

    Args:
        node: The node.
        dependent: Places of these inputs among its ``next_functions``.
    """
    name = name_of_node(node)
    if name in LINEAR or name in PIECEWISE:
        return "linear"
    alone = len(dependent) == 1
    if name in PRODUCTS and alone:
        return "linear"
    if (name == "Div" or name in NORMALISATIONS) and list(dependent) == [0]:
        return "linear" if name == "Div" or _uses_running_statistics(node) else "nonlinear"
    inputs = [upstream for upstream, _ in node.next_functions if upstream is not None]
    if name in ELEMENTWISE and alone and len(inputs) == 1:
        return "elementwise"
    return "nonlinear"


def _uses_running_statistics(node: Node) -> bool:
    """Whether a batch normalisation has taken its statistics from buffers.

    Its saved flag has no public name; a node without it is taken for nonlinear.
    """
    return hasattr(node, "_saved_training") and node._saved_training is False


def is_wrong_in_third_order(node: Node) -> bool:
    """Whether torch's second derivative of a node is itself differentiated wrongly, without a word.

    Seen on torch 2.13 for layer norm, and for batch norm by statistics of the batch (which instance norm is).
    """
    name = name_of_node(node)
    return name == "NativeLayerNorm" or (name in NORMALISATIONS and not _uses_running_statistics(node))


def is_wrong_in_second_order(node: Node) -> bool:
    """Whether torch's derivative of a node is itself differentiated wrongly, without a word.

    Seen on torch 2.13 for the fused normalisation of weights: its Hessian is not even symmetric.
    """
    return name_of_node(node) == "WeightNormInterface"


def is_once_differentiable(node: Node) -> bool:
    """Whether it is a user's function whose backward pass is marked ``once_differentiable``.

    Nothing leads from such a derivative to the inputs: PyTorch gives no error where it is differentiated in
    them, but nothing, which stands for zeros everywhere else. The class that a node was made by has no public
    name; the wrapper that the mark puts around its backward pass is known by the file that it comes from.
    """
    if not isinstance(node, BackwardCFunction):
        return False
    backward = getattr(type(node)._forward_cls, "backward", None)
    return getattr(backward, "__globals__", None) is vars(torch.autograd.function)
