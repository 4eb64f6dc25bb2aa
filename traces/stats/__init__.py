"""What a trace is like before any machine is involved, and whether it can be
trusted.
"""
