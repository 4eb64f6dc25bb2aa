"""One foreign trace format per file."""
