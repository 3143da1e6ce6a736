"""The autograd graph between a loss and the parameters: its uses, its samples, sweeps through it."""
