"""Modules for operations that are usually written as functions or methods; none of them has parameters.

packprop works with functions, so no model needs these modules. Use them to build a model of modules alone, to
slice an output by hand (``slicing.Slicing``), or to run code that was written for other libraries.
"""
