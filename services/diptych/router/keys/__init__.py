"""API keys as tenants: who calls, what the key may cost, and the ledger that all router processes share."""
