"""Segment parallelism: many instances prefill a prompt's uncached segments, and one instance combines them.

client -> router (plans segments, looks up in its directory which instance holds which record, spreads missing
segments by LPT: ``router/assign.py``) -> workers (each prefills a segment and pushes its record:
``sender.py``) -> receiver of the combine node (``receiver.py``) -> the original request waits there and is
composed from records -> first token -> router -> client.

Every instance is an ordinary ``vllm serve --attention-backend hypic``.  Events carry the names of its records
to the router's directory (``events.py``).  ``README.md`` describes a record's way from sender to receiver.
"""
