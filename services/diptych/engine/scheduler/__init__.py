"""The scheduler's process: a blocking loop around a core, the model runner and the links to peers.

`loop` performs what a core decides; nothing in here is asyncio, and nothing else touches the device.
"""
