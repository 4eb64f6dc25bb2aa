"""Routing traces of real models."""
