"""The radix tree of cached prefixes: its nodes, what they keep beside pages of tokens, and which of them go first.

It knows no pool and no request: `KvCache` moves page states by what its methods return.
"""
