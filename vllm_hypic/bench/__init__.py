"""Benchmarks: ``python -m vllm_hypic.bench``.  Each passes a correctness gate before it reports a time."""
