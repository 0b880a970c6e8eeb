"""Engines and servers in processes, prompts, statistics and reports for evaluation and benchmarks."""
