"""Motionformer with linear-complexity attention, on PySlowFast."""

__version__ = "0.1.0"
