"""Tiers: memory, disk, Redis, LMCache; one file each."""
