"""Layers of the engine: attention and linear attention over public records and the private stream."""
