"""Slicing as a module, under the path that the older library has for it."""

from packprop.compat.custom_module.slicing import Slicing

__all__ = ["Slicing"]
