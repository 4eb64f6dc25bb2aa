"""The model: exact bytes by layer, from file headers or from a table of shapes."""
