"""Engines and servers in processes, prompts, statistics, reports: for evaluation and benchmarks."""
