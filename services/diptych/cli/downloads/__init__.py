"""Files of a model from where they are kept: listed, chosen, fetched in parts that survive, and proven."""
