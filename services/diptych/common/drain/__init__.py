"""Lets a member leave without losing a request: the states of a drain, the routes that ask for it, the wait."""
