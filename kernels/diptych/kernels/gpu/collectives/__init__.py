"""Sums over the GPUs of one host, by stores into each other's memory over NVLink.

Here belong kernels that wait for other GPUs: `one_shot` for sums that are so small that latency is all they cost.
`peer_memory` opens the memory that they write to.
"""
