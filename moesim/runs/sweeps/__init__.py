"""Many runs: compared, swept over any option, kept, searched."""
