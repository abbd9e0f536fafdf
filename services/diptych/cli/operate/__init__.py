"""Change a running platform: what is declared, roles, weights, and members that leave."""
