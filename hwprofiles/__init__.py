"""The machine: its lanes, memories and costs, each with where it came from."""
