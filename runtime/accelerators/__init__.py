"""Accelerators that torch knows: one small file for each kind of device."""
