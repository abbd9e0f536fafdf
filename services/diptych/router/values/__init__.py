"""A request in the router, as values: its forms on the way to workers, its limits, how far it has come, its output.

Pure. Here belongs what `http`, `grpc`, `serve` and `tracing` tell each other about a request; what acts on it is in
`serve`.
"""
