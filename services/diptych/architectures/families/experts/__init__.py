"""Families with experts: a router gives each token some of a layer's feed-forward networks.

Here belongs a family if any of its models has experts (`Moe`), and all attend over keys and values.
"""
