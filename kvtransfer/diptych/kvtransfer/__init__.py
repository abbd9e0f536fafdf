"""Moves KV pages between workers, and knows who may use which page.

A *transport* writes pages of this process's pool into a peer's, one-sided where the hardware can, and delivers the
notes that prefill and decode exchange about a room. `transport` is the interface, in three protocols; `ucx`, `nixl`
and, for tests, `inproc` implement it, and `probe` tests a link before rooms use it.

What decides is pure, and knows no library: how pages lie in memory (`layout`, `plan`), the state of each page
(`ownership`), what workers tell each other (`notes`), what carries a link (`lanes`), how two ends agree that a link is
up (`conversation`). Codecs stand beside their values. Importing this package imports none of it.
"""
