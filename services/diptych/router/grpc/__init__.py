"""The router's gRPC API: the same pipeline as HTTP, with reflection, health, and bounds on calls."""
