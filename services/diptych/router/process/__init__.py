"""Several processes that are one router: how they start, share ports, count together, and are well."""
