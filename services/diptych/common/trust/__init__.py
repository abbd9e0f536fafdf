"""Decides who may do what: certificates, tokens, and the gatekeeper in front of every gRPC server.

`verdicts.permissions` is the table of calls that it keeps.
"""
