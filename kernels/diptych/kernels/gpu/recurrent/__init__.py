"""Recurrent layers, steps and prompts: delta rules, Mamba 2, short convolutions.

Here belongs a kernel that reads the states of requests in their slots and writes them back.
"""
