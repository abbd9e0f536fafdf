"""A router between a load generator and workers without a model, each in processes of their own."""
