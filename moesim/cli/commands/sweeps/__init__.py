"""Commands about many runs."""
