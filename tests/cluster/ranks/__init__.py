"""Engines and servers of several ranks, with real processes on the CPU."""
