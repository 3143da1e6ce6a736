"""Callbacks for the trainers of other libraries, each in a module that imports its library.

``packprop.integrations.transformers.MonitorCallback`` and ``packprop.integrations.lightning.MonitorCallback``.
"""
