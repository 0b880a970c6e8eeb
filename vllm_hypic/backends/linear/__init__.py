"""Linear-attention families: one folder each, for the capture and the composition of its records."""
