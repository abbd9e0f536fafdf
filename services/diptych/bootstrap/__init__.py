"""The membership service: who is there, in what role, and what its peers may be told. It moves no pages.

`replica` and what it imports decide; `server` and `main` put it on gRPC, several of them as replicas of each other.
"""
