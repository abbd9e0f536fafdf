"""What a request asks for and what comes of it: sampling, stops, log-probabilities, text, names of pages. Pure.

Routers and engines both stand on this; neither knows the other.
"""
