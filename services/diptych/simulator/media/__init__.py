"""Media in virtual time: tiers of a prefix cache, as fast as they are set up to be."""
