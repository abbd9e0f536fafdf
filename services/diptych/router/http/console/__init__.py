"""The console in a browser: its page, signing in, the live stream, and what operators do there.

The page holds nothing secret and is open; all that it shows comes by `/console/api/`, which wants a token. No answer
here is for pages of other origins.
"""
