"""Pages between pools: moved, packed for another layout and unpacked, with their digests.

Here belong the kernels of KV transfer. `page_mover` and `page_digest` are compiled ahead of time by `transfer_images`,
and launched by the transfer engine from C; the others are launched by torch.
"""
