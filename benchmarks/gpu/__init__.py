"""``python -m benchmarks.gpu``: what only a machine with a GPU can tell, in steps that begin where others ended."""
