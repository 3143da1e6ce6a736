"""A whole data set, batch by batch."""

from packprop.dataset.compute import compute
from packprop.dataset.result import Result

__all__ = ["Result", "compute"]
