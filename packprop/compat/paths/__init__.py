"""Modules for paths that packprop's own folders do not have: older paths, and paths of BackPACK's tutorials.

See ``packprop/__init__.py``, which adds this folder to the package's path.
"""
