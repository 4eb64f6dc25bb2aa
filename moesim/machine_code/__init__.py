"""Machine code of functions that are written in a part of Python.

`moesim.machine_code.compiled` marks a function; `translate` makes LLVM's language of
it, `store` keeps what LLVM makes of that in the user's cache folder, and `library`
loads and calls it.
"""
