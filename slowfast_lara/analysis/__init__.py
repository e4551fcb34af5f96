"""Measurements that users run on their own model, data or GPU."""
