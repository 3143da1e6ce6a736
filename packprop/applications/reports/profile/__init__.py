"""A profile of a network: its gradients and its curvature, layer by layer, in one pass over the data."""

from packprop.applications.reports.profile.result import Profile
from packprop.applications.reports.profile.run import profile

__all__ = ["Profile", "profile"]
