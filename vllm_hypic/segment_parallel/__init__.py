"""Segment parallelism: segments that are cached nowhere are prefilled on many instances and combined on one.

client -> router (plans segments, asks its directory who holds what, spreads the missing ones by LPT:
``lpt.py``) -> workers (prefill one segment each, push its record: ``sender.py``) -> receiver of the combine
node (``receiver.py``) -> the original request, which waits there, is composed from records -> first token ->
router -> client.

Every instance is an ordinary ``vllm serve --attention-backend hypic``; what it holds reaches the router's
directory as events (``events.py``).  How records get from sender to receiver: ``README.md``.
"""
