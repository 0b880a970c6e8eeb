"""Measures what reuse costs in answers, with tasks, methods and scores on the real engine.

tasks -> examples (token ids of every segment) -> answers of each method -> scores -> the gate's verdict

The package imports neither torch nor vLLM: engines run in processes of their own (``harness/engines.py``).
"""
