"""API keys as tenants: who calls, what the key may cost, the ledger of all router processes, what routers tell."""
