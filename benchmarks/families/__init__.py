"""``python -m benchmarks.families``: model families as their libraries ship them, compared with plain autograd."""
