"""``python -m benchmarks.families``: models as their libraries ship them, compared with plain autograd."""
