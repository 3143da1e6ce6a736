"""Tensors in, tensors out: structures, their statistics, how results merge."""
