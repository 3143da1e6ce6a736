"""Influence: inner products of gradients of samples, stored or computed anew, with those of queries."""

from packprop.applications.queries.influence import influence
from packprop.applications.queries.refining import Refinement
from packprop.applications.queries.result import Influence

__all__ = ["Influence", "Refinement", "influence"]
