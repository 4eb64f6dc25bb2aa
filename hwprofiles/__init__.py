"""The machine: kinds of lanes, profiles with provenance, costs derived from them."""
