"""The workload: routing traces, the steps they compose into, and the timeline of a
run.
"""
