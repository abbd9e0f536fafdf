"""Routes for operators: adapters, members, metrics; and the OpenAPI document of all routes."""
