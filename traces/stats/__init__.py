"""Statistics of a trace before any machine is involved, and signs that it cannot be
trusted.
"""
