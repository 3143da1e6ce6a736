"""The rules of packprop: one short function for each node, or family of nodes, that takes parameters.

A rule takes a ``NodeCall`` and returns the entry of the parameter at its place. It returns ``None`` to call the
node on the part of each sample (``samplewise``), which is right for all nodes, but slower. Saved tensors have
the names of PyTorch's list of derivatives (``derivatives.yaml``).
"""

from packprop.engine.functions.rules import convolution as convolution
from packprop.engine.functions.rules import elementwise as elementwise
from packprop.engine.functions.rules import grouped as grouped
from packprop.engine.functions.rules import lookup as lookup
from packprop.engine.functions.rules import normalisation as normalisation
from packprop.engine.functions.rules import products as products
from packprop.engine.functions.rules import recurrent as recurrent
