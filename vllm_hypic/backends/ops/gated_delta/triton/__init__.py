"""The layer operators in Triton; an import of any module of this package imports Triton."""
