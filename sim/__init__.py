"""The virtual world: SimPy lanes that replay a trace through the planner."""
