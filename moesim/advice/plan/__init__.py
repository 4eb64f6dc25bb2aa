"""Which settings there are, what they need, how they rank, and what to measure next."""
