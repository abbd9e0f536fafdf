"""Lines of those that wait: of tenants, whose turn it is among these. Pure."""
