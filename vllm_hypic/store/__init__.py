"""Segment store: where records live outside the device pool.  Imports no vllm.

record bytes (``record.py``) -> fetches and writes behind the caller's back (``tiered.py``,
``write_behind.py``) -> asynchronous tiers (``async_tier.py``) -> tiers (``tiers/``); what stays when a budget
is full: ``eviction/``.
"""
