"""Measuring: speed and memory, distance from exact attention, studies of many runs."""
