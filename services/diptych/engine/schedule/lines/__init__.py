"""Lines of those that wait: of tenants, whose turn it is among these, and of sessions that wait for memory. Pure."""
