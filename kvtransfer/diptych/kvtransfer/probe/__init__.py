"""Tests a new link before anything uses it: pages go over each path into memory that holds no KV, and are looked at.

The writing end chooses a path and asks, the reading end lends pages and says what arrived in them; the path that is
right and fast enough is used. `WriterTests`, `ReaderTests` and, for links over which pages go in both directions,
`TwoWayTests` decide, as values in and actions out; whoever owns the transport performs the actions.
"""
