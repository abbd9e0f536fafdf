"""Routes for operators: adapters, members, metrics."""
