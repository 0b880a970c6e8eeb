"""The connector's half in a worker: its pool, and records on their way to and from tiers and instances."""
