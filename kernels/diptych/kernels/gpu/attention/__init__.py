"""Attention over the paged KV pool: rotate and store, attend in extend and decode steps, choose what to attend to.

Here belongs every kernel that reads or writes the KV pool by a page table.
"""
