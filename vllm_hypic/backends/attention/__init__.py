"""Attention of a layer under PIC: stock kernels for the private part, span attention for the public one."""
