"""Segment store: storage of records outside the device pool.  Imports no vllm.

Record bytes (``record.py``) pass through fetches and background writes (``tiered.py``, ``write_behind.py``),
asynchronous tiers (``async_tier.py``) and tiers (``tiers/``).  ``eviction/`` decides which objects stay when
a budget is full.
"""
