"""The forward pass: functions that consume trainable parameters leave uses on the autograd graph."""
