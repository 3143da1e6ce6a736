"""Module paths of the older library that its tutorials import from; see ``packprop/__init__.py``."""
