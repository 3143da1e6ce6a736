"""The rules of the library: one short function for each node, or family of nodes, that takes parameters.

A rule is given a ``NodeCall`` and returns the entry of the parameter at its place; ``None`` means that the node
is called on the part of each sample (``samplewise``), which is right for all nodes, and slower. Names of nodes
stand as in
``functions/nodes.py``; saved tensors have the names of PyTorch's list of derivatives (``derivatives.yaml``).
"""

from packprop.functions.rules import (
    convolution,
    elementwise,
    grouped,
    heads,
    lookup,
    normalisation,
    products,
    recurrent,
)

__all__ = ["convolution", "elementwise", "grouped", "heads", "lookup", "normalisation", "products", "recurrent"]
