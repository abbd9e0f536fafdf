"""Tiers of the prefix cache that outlive a process: pages in files or a store, in one format, verified before use.

What is decided is pure: the format of a page on any medium (`page_format`), which segment holds what and which goes
(`segments`), which objects a text is made of (`runs`), whether a medium is trusted (`breaker`). Threads read and write
(`page_reader`, `page_writer`), so that no step waits for a medium: `file_tier` and `shared_tier` are the doors. It runs
in a scheduler's process, which alone imports it.
"""
