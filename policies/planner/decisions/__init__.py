"""The parts of planning one layer step, one file each."""
