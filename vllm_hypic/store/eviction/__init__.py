"""Eviction: policies, their ranking of objects, and the FLOPs of a model's prefill."""
