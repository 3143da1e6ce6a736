"""Memory: counting bytes, and writing them for people."""

from packprop.engine.memory import LiveBytes, byte_count, byte_text

__all__ = ["LiveBytes", "byte_count", "byte_text"]
