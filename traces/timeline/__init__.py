"""The record of a run: spans, metrics computed from them, and the Perfetto export."""
