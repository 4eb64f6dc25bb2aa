"""The physical bound: what no schedule of a trace on a machine can beat.

`docs/explanation/bound.md` states it as a theorem and proves it.
"""
