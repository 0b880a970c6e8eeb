"""Linear-attention families: the algebra of their transitions and, per family, capture and composition."""
