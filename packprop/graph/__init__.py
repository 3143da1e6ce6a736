"""The autograd graph between a loss and the parameters: its uses, and sweeps through it."""
