"""Calibration of a machine, and simulated runs held against measured ones."""
