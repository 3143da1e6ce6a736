"""Which stored samples pull on a model as some queries do: inner products of gradients."""

from packprop.queries.influence import influence
from packprop.queries.refining import Refinement
from packprop.queries.result import Influence

__all__ = ["Influence", "Refinement", "influence"]
