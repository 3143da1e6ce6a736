"""Where ``packprop.Monitor`` logs to, beside functions and file names."""

from packprop.monitor.logs import JsonLines, Printed, TensorBoard
from packprop.monitor.monitor import QUANTITIES as QUANTITIES
from packprop.monitor.monitor import Monitor as Monitor
from packprop.monitor.spikes import Spike, SpikeSample, SpikeToken

# Monitor stands at the top; what it can be asked for is in its docstring.
__all__ = ["JsonLines", "Printed", "Spike", "SpikeSample", "SpikeToken", "TensorBoard"]
