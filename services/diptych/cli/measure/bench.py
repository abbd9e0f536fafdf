"""Measures KV page writes between this process and a peer, over every path: `diptych bench kv`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final, Literal

from diptych.cli.platform.local_platforms import PLATFORM_HELP, local_platform
from diptych.cli.platform.whereabouts import let_in
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.common.net.reachable import transfer_where
from diptych.common.trust.trust import TrustConfig
from diptych.kvtransfer.lanes import Transports

DEFAULT_PORT: Final = 7070


@dataclass(frozen=True, slots=True)
class BenchConfig(TrustConfig):
    """Measure how fast KV pages reach another process, on this host or on another one.

    Start `diptych bench kv --serve` on one host and `diptych bench kv --peer HOST:PORT` on the other; on the same one,
    `diptych bench kv`. Every path is tried with every piece size, and what arrived is verified; beside it stands the
    speed of a local memory copy.
    """

    what: Literal["kv"] = argument(
        REQUIRED, help="what to measure: kv; or, by commands of their own: serve, batch, step"
    )
    serve: bool = option(False, help="be the end that is written to, until Ctrl-C")
    peer: str = option("", help=f"address of the end that is written to; none: 127.0.0.1:{DEFAULT_PORT}")
    host: str = option("127.0.0.1", help="address to listen on, with --serve")
    port: int = option(DEFAULT_PORT, help="port to listen on, with --serve; 0: any free one")
    pool_mib: int = option(256, help="memory that is written from, or to with --serve, MiB")
    piece_kib: tuple[int, ...] = option((16, 64, 256, 1024, 2048), help="sizes of the scattered pieces, KiB")
    rounds: int = option(5, help="times that all pieces are written; the best counts")
    transports: Transports = option("auto", help="ways to move KV pages; auto: the fastest")
    platform: str = option("", help=f"whose token is used where none is given: {PLATFORM_HELP}")
    json: bool = option(False, help="print JSON, for programs")

    def validate(self) -> None:
        if self.serve and self.peer:
            raise ConfigError("give either --serve, or --peer with the address of a process that serves")
        if self.pool_mib < 1 or self.rounds < 1:
            raise ConfigError("--pool-mib and --rounds must be at least 1")
        for size in self.piece_kib:
            if size < 16 or size % 16 or size > self.pool_mib * 1024:
                raise ConfigError(f"--piece-kib takes multiples of 16, at most --pool-mib, not {size}")
        if not self.piece_kib:
            raise ConfigError("--piece-kib needs at least one size")


def main(config: BenchConfig) -> int:
    if not config.is_trust_configured():  # both ends need a token, and a platform here has one
        config = let_in(config, local_platform(config.platform))
    trust = config.trust()
    if config.serve:
        from diptych.cli.requests.kv_bench import serve_until_signal

        transfer_where(config.host)
        serve_until_signal(config.host, config.port, trust, config.pool_mib, config.transports)
        return 0
    from diptych.cli.requests.kv_bench import as_json, as_text, measure

    peer = config.peer or f"127.0.0.1:{DEFAULT_PORT}"
    report = measure(peer, trust, config.pool_mib, config.piece_kib, config.rounds, config.transports)
    print(as_json(report) if config.json else as_text(report))
    sys.stdout.flush()
    return 0 if report.is_intact else 1
