"""A worker's asyncio process: gRPC and HTTP, sessions with routers, membership, health, drain and role changes.

It knows no KV page: it talks to its scheduler processes over ZeroMQ (`scheduler_client`).
"""
