"""Which settings are fastest for a model on a machine, how fast, and how sure.

The function is `moesim.advise`; it stands in `moesim.advice.advise`.
"""
