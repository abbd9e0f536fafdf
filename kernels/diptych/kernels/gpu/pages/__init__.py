"""Pages between pools: moved, packed for another layout and unpacked, with their digests.

Here belong the kernels of KV transfer. They are compiled ahead of time by `transfer_images`, and launched by the
transfer engine from C; tests launch them by torch.
"""
