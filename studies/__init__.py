"""Studies of many training runs; they run from a checkout and are not installed."""
