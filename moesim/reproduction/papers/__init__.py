"""The papers' tables and figures that need a machine, computed on models of the
machines they were measured on: one file per paper.
"""
