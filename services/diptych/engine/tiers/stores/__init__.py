"""Stores of objects that workers share: a directory, buckets by `obstore`, servers by `valkey`; and who bounds one.

Each is a few calls that may wait, by threads of `page_reader` and `page_writer`; none of them knows what a page is.
"""
