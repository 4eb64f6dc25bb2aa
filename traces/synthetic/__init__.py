"""Routing that nobody recorded, drawn with the statistics of a real trace or stated
ones.
"""
