"""Module paths that do not stand at the top: older ones of packprop, and those of BackPACK's tutorials.

See ``packprop/__init__.py``, which adds this folder to the package's path.
"""
