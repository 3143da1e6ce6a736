"""How well influence foretells retraining, beside other libraries: ``python -m benchmarks.attribution``."""
