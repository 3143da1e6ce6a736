"""Memory: counters of bytes, and byte counts as readable text."""

from packprop.engine.memory import LiveBytes, byte_count, byte_text

__all__ = ["LiveBytes", "byte_count", "byte_text"]
