"""Families with latent attention: the KV pool holds one compressed vector a token instead of keys and values.

Here belongs a family if any of its models has latents (`Latent`), with or without experts, and with or without an
index of the tokens that are attended to (`Indexer`). `deepseek_v3` has what the others share.
"""
