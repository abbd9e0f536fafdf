"""The front door: OpenAI's, Anthropic's and native HTTP, and gRPC; it picks the workers of each request.

A request goes through `http` or `grpc` to `serve.pipeline`, which prepares it (`text`), admits it (`admission`), picks
its workers (`choose`, by what `workers` tells) and puts the answer together. `values` are the
forms that it takes on that way, and `wiring` constructs all of it.
"""
