"""Compiled steps: a pass with its quantities, traced once and replayed."""
