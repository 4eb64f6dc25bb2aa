"""Microbenchmarks that fill a hardware profile."""
