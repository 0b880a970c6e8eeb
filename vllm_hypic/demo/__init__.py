"""Demonstrations on real servers: ``python -m vllm_hypic.demo``, ``python -m vllm_hypic.demo.parallel``."""
