"""Families of tasks that only ``python -m benchmarks.answers`` asks, beside those of the gate."""
