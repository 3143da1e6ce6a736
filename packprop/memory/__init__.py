"""Memory: counting bytes, planning them, and keeping within a budget."""

from packprop.memory.bytes import byte_count, byte_text
from packprop.memory.live import LiveBytes

__all__ = ["LiveBytes", "byte_count", "byte_text"]
