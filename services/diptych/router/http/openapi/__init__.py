"""The OpenAPI document of the router's routes."""
