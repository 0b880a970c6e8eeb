"""Numerical operators: one folder per operator, with a plain `reference` beside every fast implementation.
Operators of linear layers share the code in `linear_layer`."""
