"""Memory: counting bytes, planning them, and keeping within a budget."""

from packprop.engine.memory.bytes import byte_count, byte_text, resident_now, resident_peak
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.plan import Plan, gradients_are_there
from packprop.engine.memory.planning import chunk_sizes_over_data, plan_over_data
from packprop.engine.memory.search import budget_of

__all__ = [
    "LiveBytes",
    "Plan",
    "budget_of",
    "byte_count",
    "byte_text",
    "chunk_sizes_over_data",
    "gradients_are_there",
    "plan_over_data",
    "resident_now",
    "resident_peak",
]
