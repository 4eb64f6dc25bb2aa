"""From the spans of designed runs to the costs of a hardware profile."""
