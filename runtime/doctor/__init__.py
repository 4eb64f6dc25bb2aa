"""What a machine has, and what of it works: checks that take seconds."""
