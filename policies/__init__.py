"""The decisions: routing, assignment, prefetch and cache, one policy per file."""
