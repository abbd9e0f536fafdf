"""Decides what of a document has changed, as a merge patch (RFC 7396). Pure.

Such a patch cannot set a member to null, because null takes a member away. Hence the rule of all documents here: a
member that is null and a member that is absent mean the same. A value that becomes unknown is taken away, and who reads
a patched document finds it absent. Members of lists may be null: a list is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes `new` of `old`; empty if that is nothing. Parts that are one object are not looked into."""
    if old is new:
        return {}
    patch: dict[str, Any] = {}
    if not old.keys() <= new.keys():
        patch = {name: None for name in old if name not in new and old[name] is not None}
    for name, value in new.items():
        before = old.get(name)
        if value is before:
            continue
        if type(value) is not type(before):
            patch[name] = value
        elif isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                patch[name] = inner
        elif value != before:
            patch[name] = value
    return patch


def merged(document: Any, patch: Any) -> Any:
    """Return the document that a patch makes of one, as RFC 7396 has it; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def without_nulls(document: Any) -> Any:
    """Return the same document without the members that are null."""
    if not isinstance(document, dict):
        return document
    return {name: without_nulls(value) for name, value in document.items() if value is not None}
