"""What `tools/benchmark.py` measures, and the plain layer it measures against."""
