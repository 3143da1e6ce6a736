"""The forward pass: marks at losses and at the outputs of models, hooks, reentrant checkpoints."""
