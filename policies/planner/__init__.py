"""The planner and its books: the one place that asks policies, in one fixed order, for
both worlds.
"""
