"""Virtual time: two clocks that walk a trace through the engine."""
