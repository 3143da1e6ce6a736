"""Rules for parameters that enter nodes of the autograd graph, and for the curvature of losses.

``packprop.functions`` has the names that you need to register functions and losses of your own.
"""

from packprop.engine.functions.entry import Entry
from packprop.engine.functions.losses.description import describe
from packprop.engine.functions.registry import rule_for, trusting_rules, without_rules

__all__ = ["Entry", "describe", "rule_for", "trusting_rules", "without_rules"]
