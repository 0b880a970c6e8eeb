"""Engines in processes, comparisons of answers, options and tables, for commands and benchmarks."""
