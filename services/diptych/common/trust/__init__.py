"""Decides who may do what: certificates, tokens, permissions, and the gatekeeper in front of every gRPC server."""
