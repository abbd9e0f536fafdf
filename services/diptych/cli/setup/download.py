"""Bring a model to where workers read it: `diptych download ORG/NAME FOLDER`. Done again, it ends at once.

A download that was cut off, or killed, goes on where it was. Several at once into one folder are one: the others wait.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from diptych.cli.downloads.downloading import Pace, await_complete, download
from diptych.cli.downloads.manifest import Wanted
from diptych.cli.downloads.remote_files import Origin
from diptych.cli.downloads.selection import Part
from diptych.cli.downloads.sources import Source, parse_source
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.common.lifecycle import raising_on_sigterm
from diptych.common.logging import LogConfig, setup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DownloadConfig(LogConfig):
    """Bring a model's files into a folder: proven, resumed after any end, complete or not named so.

    Credentials come from the environment: HF_TOKEN (and HF_ENDPOINT), AWS_…, GOOGLE_…, AZURE_…, DIPTYCH_BEARER_TOKEN.
    """

    source: str = argument(REQUIRED, help="ORG/NAME[@REVISION] of a hub, hf://, s3://, gs://, az://, https://, file://")
    dest: Path = argument(REQUIRED, help="folder, which workers are given as --model")
    revision: str = option("", help="of a hub: branch, tag or commit; none: main")
    files: Part = option("all", help="tokenizer: what a router needs, without weights")
    include: tuple[str, ...] = option((), help="patterns of the weights that are meant, as '*Q4_K_M.gguf'")
    await_s: float = option(0.0, help="download nothing: wait so many seconds until somebody else has; 0: download")
    parallel: int = option(4, help="files at once")
    lease_s: float = option(30.0, help="so long a silence of the one that downloads, and another one goes on")
    progress_s: float = option(10.0, help="seconds between lines about the progress")
    etag_is_md5: bool = option(False, help="of a bucket without SHA256SUMS: an ETag that looks like an MD5 is one")
    bearer_token: str = option("", help="for https://; as DIPTYCH_BEARER_TOKEN no list of processes shows it")

    def validate(self) -> None:
        for name in ("parallel", "lease_s", "progress_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if self.await_s < 0:
            raise ConfigError(f"--await-s must not be negative, but is {self.await_s}")


def main(config: DownloadConfig) -> int:
    """Return 0 once all of it is there."""
    setup("download", config.log_format, config.log_level)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells addresses, signatures included
    source = parse_source(config.source, config.revision)
    wanted = Wanted(str(source), config.files, config.include)
    if config.await_s:
        await_complete(config.dest, wanted, config.await_s)
        logger.info("%s is complete in %s", source, config.dest)
        return 0
    pace = Pace(config.parallel, config.lease_s, config.progress_s)
    with raising_on_sigterm():
        progress = download(origin_of(source, config), config.dest, wanted, pace)
    if progress is None:
        logger.info("%s is complete in %s: nothing to do", source, config.dest)
    else:
        logger.info("complete in %s: %s, %d bytes fetched", config.dest, progress.words(), progress.fetched)
    return 0


def origin_of(source: Source, config: DownloadConfig) -> Origin:
    """Return who lists and reads the files; each comes with the libraries that it needs."""
    match source.kind:
        case "hub":
            from diptych.cli.downloads.hub import Hub

            return Hub(source)
        case "store":
            from diptych.cli.downloads.stores import Store

            return Store(source.place, etag_is_md5=config.etag_is_md5)
        case "web":
            from diptych.cli.downloads.web import Web

            return Web(source.place, config.bearer_token)
        case "folder":
            from diptych.cli.downloads.folders import Folder

            return Folder(source.place)
