"""Segment store: where records live outside the device pool.  Imports no vllm.

record bytes (``record.py``) -> lanes, write-behind, single flight (``tiered.py``) -> tiers (``tiers/``);
what stays when a budget is full: ``eviction/``.
"""
