"""Compares packprop with its peers; nothing in the package imports this folder.

This file also has to exist: Opacus installs a package of the same name, and an ordinary package
found later on the path would win over a folder without an ``__init__.py``.
"""
