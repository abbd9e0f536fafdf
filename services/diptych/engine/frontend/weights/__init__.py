"""How a worker comes to serve other weights while it runs: asked over HTTP, given by another worker, changed as one."""
