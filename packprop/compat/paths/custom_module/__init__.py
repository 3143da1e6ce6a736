"""Modules for operations, under the path that the older library has for them."""
