"""The main job: what the gradients and the curvature of a network look like, layer by layer."""

from packprop.reports.profile.result import Profile
from packprop.reports.profile.run import profile

__all__ = ["Profile", "profile"]
