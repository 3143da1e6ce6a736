"""Modules for operations that are usually written as functions or methods; none of them has parameters.

Recording sees functions, so a model never needs them here. They serve those who build models of modules alone,
slice an output by hand (``slicing.Slicing``), or bring code that was written for other libraries.
"""
