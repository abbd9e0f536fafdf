"""What a caller of the router can get, beyond the common tree. `code` is the word that OpenAI clients test for.

DiptychError
├── InvalidRequest
│   ├── ContextLengthExceeded   400  the prompt leaves no room for an output token
│   └── PayloadTooLarge         413  the body is longer than the router reads
└── NotFound
    └── ModelNotFound           404  this router serves another model
"""

from __future__ import annotations

from diptych.common.errors import InvalidRequest, NotFound


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an output token."""


class PayloadTooLarge(InvalidRequest):
    """The body is longer than the router reads."""

    http_status = 413


class ModelNotFound(NotFound):
    """This router serves another model."""
