"""Numerical operators: one folder per operator, a plain `reference` beside every fast implementation; what
operators of linear layers share is in `linear_layer`."""
