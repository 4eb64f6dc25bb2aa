"""Synthetic routing: drawn with the statistics of a real trace, or with stated ones."""
