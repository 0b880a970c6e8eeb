"""Copies of records between a pool and host memory."""
