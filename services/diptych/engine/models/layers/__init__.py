"""The parts of a decoder layer, shared by all families."""
