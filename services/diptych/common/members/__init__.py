"""Describes members of a platform as all components see them: entries, roles, liveness, and the client of bootstrap."""
