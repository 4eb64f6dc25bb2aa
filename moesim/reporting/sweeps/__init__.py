"""Reports of sweeps: text, pictures, and a page to explore."""
