"""Segment parallelism: cold segments are prefilled on many workers and combined on one."""
