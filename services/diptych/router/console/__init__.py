"""The console: what a browser shows of the platform, live. `state` says what that is; every part is a JSON endpoint.

Nothing here is gathered while nobody looks: the first viewer starts the gathering, and it ends soon after the last one.
"""
