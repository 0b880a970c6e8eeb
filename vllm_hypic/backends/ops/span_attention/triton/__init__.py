"""Span attention in Triton; importing any module of these imports Triton."""
