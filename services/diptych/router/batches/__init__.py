"""Batches: files of requests that are done when there is nothing better to do, and survive whoever does them."""
