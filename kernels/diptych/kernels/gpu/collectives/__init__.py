"""Sums and exchanges over the GPUs of one host, by stores into each other's memory over NVLink.

Here belong kernels that wait for other GPUs (`meeting`): `one_shot` for sums that are so small that latency is all they
cost, `expert_exchange` for tokens on their way to experts and back. `peer_memory` opens the memory that they write to.
"""
