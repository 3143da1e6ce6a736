"""``python -m benchmarks.gpu``: what only a machine with a GPU can tell, step by step."""
