"""The layer operators in Triton; importing any module of these imports Triton."""
