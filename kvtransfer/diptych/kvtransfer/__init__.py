"""Moves KV pages between workers: one-sided page writes and notes over UCX, and who may use which page.

Pure: `layout` (how pages lie in memory), `ownership` (one state a page), `notes` (what workers tell each other).
Interface: `transport`. Implementations: `ucx`, with a C shim that owns the network thread, and `inproc` for tests.
`aio` is the asyncio face. Importing this package imports none of them.
"""
