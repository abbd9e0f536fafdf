"""The KV transfers of all ranks of an instance as those of one: names of ranks, links to a peer's ranks, operations."""
