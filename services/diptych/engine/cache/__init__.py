"""The KV cache of a scheduler: a radix tree over pages, in the KV pool and in tiers below it. Pure.

`kv_cache` is the door: it allocates, shares, retires and evicts pages. `tree.radix_check` recounts every invariant.
"""
