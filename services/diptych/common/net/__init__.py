"""Provides ports, connections and servers: HTTP with bounds on what strangers may cost, gRPC, listening sockets."""
