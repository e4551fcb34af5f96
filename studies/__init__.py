"""Studies of many training runs: run from a checkout, not installed."""
