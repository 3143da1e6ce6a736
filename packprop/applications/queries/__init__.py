"""Influence: inner products of stored gradients with those of some queries."""

from packprop.applications.queries.influence import influence
from packprop.applications.queries.refining import Refinement
from packprop.applications.queries.result import Influence

__all__ = ["Influence", "Refinement", "influence"]
