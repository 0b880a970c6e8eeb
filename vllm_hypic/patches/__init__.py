"""Patches of vLLM 0.32, one file each: what, why, until when.  Each patch checks the function it wraps."""
