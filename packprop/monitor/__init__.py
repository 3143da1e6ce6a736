"""Logs of ``packprop.Monitor``, beside functions and file names."""

from packprop.monitor.logs import JsonLines, Printed, TensorBoard
from packprop.monitor.monitor import QUANTITIES as QUANTITIES
from packprop.monitor.monitor import Monitor as Monitor
from packprop.monitor.spikes import Spike, SpikeSample, SpikeToken

# Monitor stands at the top; its docstring lists the quantities.
__all__ = ["JsonLines", "Printed", "Spike", "SpikeSample", "SpikeToken", "TensorBoard"]
