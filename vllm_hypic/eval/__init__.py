"""Measures what reuse costs in answers, with tasks, methods and metrics on the real engine.

tasks -> examples (token ids of every segment) -> outcomes of each method -> scores -> tables and plots

The package imports neither torch nor vLLM: engines run in processes of their own (``harness/engines.py``).
"""
