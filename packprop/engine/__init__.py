"""The lower storey: one backward pass, from the nodes of the graph to values of parameters.

Each folder is a room, and its ``__init__`` lists what the applications above may use.
"""
