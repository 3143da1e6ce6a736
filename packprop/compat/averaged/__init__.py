"""KFRA and HBP: Kronecker factors of curvature averaged over samples, made of exports of the engine."""

from packprop.compat.averaged.extensions import BOTEV_MARTENS, CHEN, HBP, KFRA

__all__ = ["BOTEV_MARTENS", "CHEN", "HBP", "KFRA"]
