"""Where an output ends: stop tokens, stop strings, and regular expressions in linear time. Pure."""
