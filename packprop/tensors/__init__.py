"""Facts about tensors that need no computation: their samples, precision, device, state."""
