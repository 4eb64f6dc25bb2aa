"""The base that every package needs and none owns: files, checked JSON, sizes, seals,
errors.
"""
