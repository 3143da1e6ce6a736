"""Data of examples, under the name that the older library has for it."""

from packprop.examples import load_one_batch_mnist

__all__ = ["load_one_batch_mnist"]
