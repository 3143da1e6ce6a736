"""Memory: counting bytes, planning them, and keeping within a budget."""

from packprop.engine.memory.bytes import byte_count as byte_count
from packprop.engine.memory.bytes import byte_text as byte_text
from packprop.engine.memory.bytes import resident_now as resident_now
from packprop.engine.memory.bytes import resident_peak as resident_peak
from packprop.engine.memory.live import LiveBytes as LiveBytes
from packprop.engine.memory.plan import Plan as Plan
from packprop.engine.memory.plan import gradients_are_there as gradients_are_there
from packprop.engine.memory.planning import chunk_sizes_over_data as chunk_sizes_over_data
from packprop.engine.memory.planning import plan_over_data as plan_over_data
from packprop.engine.memory.planning import step_over_data as step_over_data
from packprop.engine.memory.search import budget_of as budget_of
