"""Files of a repository on a hub of Hugging Face's kind: HF_ENDPOINT and HF_TOKEN say which, and for whom.

`huggingface_hub` resolves, lists, and knows tokens and errors. Bytes are read here, by the addresses that it names: its
own downloads are compared by their sizes alone, and tell how far they are to a terminal, not to a log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diptych.cli.downloads.remote_files import Digest, Interrupted, Listing, RemoteFile
from diptych.cli.downloads.sources import Source
from diptych.cli.downloads.web import PASSES, ranged
from diptych.common.errors import ConfigError

TIMEOUT_S: Final = 60.0


class Hub:
    """Implements `Origin`. A branch is what it was when it was listed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._commit = source.revision

    def listed(self) -> Listing:
        api = HfApi(endpoint=self._endpoint)
        place, revision = self._source.place, self._source.revision
        try:
            told = api.model_info(place, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
            raise self._refused(error) from None
        self._commit = told.sha or revision
        return Listing(tuple(_file(each) for each in told.siblings or ()), self._commit)

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        url = hf_hub_url(self._source.place, file.name, revision=self._commit, endpoint=self._endpoint)
        token = get_token()
        yield from ranged(url, {"authorization": f"Bearer {token}"} if token else {}, offset)

    def _refused(self, error: Exception) -> ConfigError | Interrupted:
        """Say in words what the library's own, which are many lines, come to."""
        name = self._source.place
        match error:
            case GatedRepoError():
                return ConfigError(f"{name} is gated: ask for access on its page, and give HF_TOKEN, as a secret")
            case RepositoryNotFoundError():
                return ConfigError(f"there is no model {name}, or it is private: then give HF_TOKEN, as a secret")
            case RevisionNotFoundError():
                return ConfigError(f"{name} has no revision {self._source.revision}")
            case HfHubHTTPError() if error.response is not None and error.response.status_code not in PASSES:
                status = error.response.status_code
                return ConfigError(f"{name}: the hub answers with status {status}; is HF_TOKEN right?")
        return Interrupted(f"{name}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")


def _file(told: Any) -> RemoteFile:
    """Large files have their SHA-256, small ones the hash of their blob: either names the bytes."""
    if told.lfs is not None:
        return RemoteFile(told.rfilename, told.lfs.size, told.lfs.sha256, Digest("sha256", told.lfs.sha256))
    digest = Digest("git", told.blob_id) if told.blob_id else None
    return RemoteFile(told.rfilename, told.size or 0, told.blob_id or "", digest)
