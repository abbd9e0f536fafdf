"""Tests a new link before anything uses it: pages go over each path into memory that holds no KV, and are looked at.

`WriterTests` and `ReaderTests` decide, as values in and actions out; whoever owns the transport performs the actions.
"""
