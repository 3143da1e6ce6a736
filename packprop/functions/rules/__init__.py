"""The rules: one short function for each torch function, or family of them, that takes parameters."""

from packprop.functions.rules import (
    affine,
    convolution,
    elementwise,
    grouped,
    heads,
    lookup,
    normalisation,
    recurrent,
)

__all__ = ["affine", "convolution", "elementwise", "grouped", "heads", "lookup", "normalisation", "recurrent"]
