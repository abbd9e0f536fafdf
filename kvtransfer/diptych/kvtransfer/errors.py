"""What can go wrong in the transfer engine.

DiptychError
├── TransferError             base: this transfer or link failed; others are untouched
│   ├── PeerUnreachable       no link to that peer (any more)
│   ├── TransferQueueFull     too much is in flight: try again after the next completion
│   ├── PageOutOfRange        a page that one of the two pools does not have
│   ├── NoteTooLong           longer than any note may be
│   ├── LayoutMismatch        a peer's pages can't be converted to ours or ours to its; says why
│   └── MalformedMetadata     a peer's connection metadata can't be used; says why
└── MalformedNote             a peer's note can't be understood; it is dropped
"""

from __future__ import annotations

from diptych.common.errors import DiptychError


class TransferError(DiptychError):
    """A transfer or a link failed. No other peer is affected."""

    grpc_status = "UNAVAILABLE"


class PeerUnreachable(TransferError):
    """There is no link to that peer."""


class TransferQueueFull(TransferError):
    """Too much is in flight: try again after the next completion."""


class PageOutOfRange(TransferError):
    """A page index that one of the two pools does not have. Nothing was written."""


class NoteTooLong(TransferError):
    """A note longer than any note may be. Nothing was sent."""


class LayoutMismatch(TransferError):
    """Pages of the one pool can't become pages of the other."""


class MalformedMetadata(TransferError):
    """A peer's connection metadata can't be used."""


class MalformedNote(DiptychError):
    """A peer's note can't be understood."""
