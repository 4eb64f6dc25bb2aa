"""A command line that somebody has: what it means, how fast, what to change first."""
