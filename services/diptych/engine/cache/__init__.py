"""The KV cache of a scheduler: a radix tree over pages, in the device's tier and the host's. Pure.

`kv_cache` is the door: it allocates, shares, retires and evicts pages. `radix_check` recounts every invariant.
"""
