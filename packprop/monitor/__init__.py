"""Watching a training run: gradient noise, norms of samples' gradients, curvature, now and then."""

from packprop.monitor.logs import JsonLines, Printed, TensorBoard
from packprop.monitor.monitor import QUANTITIES, Monitor

__all__ = ["QUANTITIES", "JsonLines", "Monitor", "Printed", "TensorBoard"]
