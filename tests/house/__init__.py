"""Tests about the whole: imports, private parts of PyTorch, README, the gallery, the coverage page."""
