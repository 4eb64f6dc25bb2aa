"""Other people's machines: measured rows, predicted blind, and how far off we are."""
