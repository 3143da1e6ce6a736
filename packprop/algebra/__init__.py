"""Tensors in, tensors out: structures, their statistics, and the merging of results."""
