"""Demonstrations on real servers: ``python -m examples.demo``, ``python -m examples.demo.parallel``."""
