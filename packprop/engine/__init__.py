"""One backward pass: the order of its sweeps, and the merging of results at leaves."""
