"""Attention layers under PIC: stock kernels compute the private part, span attention the public part."""
