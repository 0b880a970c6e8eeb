"""Linear-attention families: each folder captures and composes the records of one family."""
