"""The engine that runs by default: planner, transfers, layer step and clock as small
typed classes, compiled where there is a C compiler.
"""
