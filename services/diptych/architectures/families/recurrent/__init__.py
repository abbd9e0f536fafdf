"""Families with recurrent layers, which keep a state of fixed size instead of keys and values.

Here belongs a family if any of its models has such layers (`Recurrent`: delta rules, Mamba 2, short convolutions),
whatever its other layers are.
"""
