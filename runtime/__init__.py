"""A real clock for the policies: expert weights in memory, lanes that compute and copy,
and models that run. PyTorch lives here.
"""
