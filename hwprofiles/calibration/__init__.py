"""Fits costs of a hardware profile to the spans of designed runs."""
