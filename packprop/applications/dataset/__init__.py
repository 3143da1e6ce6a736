"""A whole data set, batch by batch."""

from packprop.applications.dataset.compute import compute
from packprop.applications.dataset.result import Result

__all__ = ["Result", "compute"]
