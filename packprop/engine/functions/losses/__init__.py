"""Descriptions of loss functions: square roots of their Hessians, Monte Carlo draws, numbers of terms."""

from packprop.engine.functions.losses import rules as rules
from packprop.engine.functions.losses.description import LOSSES as LOSSES
from packprop.engine.functions.losses.description import SYMMETRIC as SYMMETRIC
from packprop.engine.functions.losses.description import Loss as Loss
from packprop.engine.functions.losses.description import Root as Root
from packprop.engine.functions.losses.description import describe as describe
from packprop.engine.functions.losses.description import register_loss as register_loss
from packprop.engine.functions.losses.description import told_axes as told_axes
from packprop.engine.functions.losses.roots import bernoulli_root as bernoulli_root
from packprop.engine.functions.losses.roots import gaussian_root as gaussian_root
from packprop.engine.functions.losses.roots import softmax_root as softmax_root
