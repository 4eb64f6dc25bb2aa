"""`moesim advise` and `moesim model`: settings for a model file, and what is in it."""
