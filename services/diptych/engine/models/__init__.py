"""Model architectures on torch."""
