"""Numerical operators: one folder per operator, a plain `reference` beside every fast implementation."""
