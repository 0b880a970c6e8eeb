"""Patches of vLLM 0.32, one file each: what, why, until when.  Each checks what it wraps."""
