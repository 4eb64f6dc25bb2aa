"""Speed and memory, printed as ratios against something independent measured in the
same run.
"""
