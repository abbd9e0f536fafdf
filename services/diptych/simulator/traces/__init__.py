"""Calls to simulate: read from traces of others and from our own request log, or generated from a seed. Pure."""
