"""Questions about runs: gaps to oracles, hit rates, answer quality, sensitivity."""
