"""The trace itself: schema, reading, writing, and composing recorded sequences into
forward passes.
"""
