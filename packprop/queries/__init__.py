"""Influence: inner products of stored gradients with those of some queries."""

from packprop.queries.influence import influence
from packprop.queries.refining import Refinement
from packprop.queries.result import Influence

__all__ = ["Influence", "Refinement", "influence"]
