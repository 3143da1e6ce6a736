"""A profile of a network: its gradients and its curvature, layer by layer, in one pass over the data."""

from packprop.reports.profile.result import Profile
from packprop.reports.profile.run import profile

__all__ = ["Profile", "profile"]
