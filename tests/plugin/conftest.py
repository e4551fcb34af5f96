"""The stand-in has a test_net.py, as PySlowFast has, which is no test."""

collect_ignore = ["checkout"]
