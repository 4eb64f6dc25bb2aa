"""Expert weights on disk and in memory."""
