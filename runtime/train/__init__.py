"""Training: of the model that ships, and of FlashMoE's cache network."""
