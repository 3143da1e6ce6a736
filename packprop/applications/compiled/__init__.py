"""Compiled steps: packprop traces a pass with its quantities once, and replays it."""
