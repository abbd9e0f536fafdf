"""Tiers of the prefix cache that outlive a process: pages in files, in one format, verified before anybody sees them.

What is decided is pure: the format of a page on any medium (`page_format`), which segment holds what and which goes
(`segments`), whether a medium is trusted (`breaker`). Threads read and write, so that no step waits for a medium:
`file_tier` is the door. It runs in a scheduler's process, which alone imports it.
"""
