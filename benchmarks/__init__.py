"""Benchmarks: ``python -m benchmarks``.  Each passes a correctness gate before it reports a time."""
