"""A validation whose cells, repetitions and aims are stated before it is measured."""
