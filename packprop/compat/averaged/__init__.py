"""KFRA and HBP: Kronecker factors of curvature that is averaged over samples layer by layer."""

from packprop.compat.averaged.extensions import BOTEV_MARTENS, CHEN, HBP, KFRA

__all__ = ["BOTEV_MARTENS", "CHEN", "HBP", "KFRA"]
