"""The compiled engine: whole runs in one compiled loop, equal to SimPy to the last bit.

`moesim.engine` and `moesim.sim` say what happens, readably; here stands the same for
arrays. Decisions are the policies' own kernels (`moesim.policies.kernels`).
"""
