"""Commands that look at this machine."""
