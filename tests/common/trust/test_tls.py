"""Certificates instead of a token, or beside one: real servers, and certificates as the documentation makes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from guarded_server import INSTANCE, KNOWS_ALL, METHODS, OURS, call_of, cancel, code_of, one_of, run, serving, watch

from diptych.common.errors import ConfigError
from diptych.common.members.membership_client import Registration
from diptych.common.net.rpc import open_channel
from diptych.common.trust.tls import Tls, TlsFiles
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import INSECURE, Trust
from diptych.common.verdicts.permissions import Party
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc

NewAuthority = Callable[[str], Any]
SERVED, REFUSED = "served, or told that nobody is there", grpc.StatusCode.PERMISSION_DENIED


def by(files: TlsFiles, tokens: Tokens | None = None) -> Trust:
    return Trust(tokens, Tls(files))


def test_only_certificates_of_our_authority_get_a_connection(new_authority: NewAuthority, tmp_path: Path) -> None:
    ours, theirs = new_authority("ours"), new_authority("theirs")
    good = ours.sign(tmp_path / "good")
    strangers = {
        "another authority's": by(theirs.sign(tmp_path / "other")),
        "another's, but they trust ours": by(replace(theirs.sign(tmp_path / "mixed"), ca=good.ca)),
        "expired": by(ours.sign(tmp_path / "old", days=-1)),
        "plaintext": INSECURE,
        "plaintext with a token": OURS,
    }

    async def test() -> None:
        async with serving(by(good)) as address:
            assert await code_of(watch, address, by(ours.sign(tmp_path / "member"))) == (
                grpc.StatusCode.OK,
                "",
            )
            for name, stranger in strangers.items():
                for method in METHODS:
                    code, _ = await code_of(call_of(method), address, stranger)
                    assert code is grpc.StatusCode.UNAVAILABLE, (name, method)

    run(test)


def test_a_client_does_not_talk_to_a_server_that_can_not_prove_itself(
    new_authority: NewAuthority, tmp_path: Path
) -> None:
    ours, theirs = new_authority("ours"), new_authority("theirs")
    us = by(ours.sign(tmp_path / "us"), OURS.tokens)
    impostors = {
        "another authority's": theirs.sign(tmp_path / "other"),
        "expired": ours.sign(tmp_path / "old", days=-1),
        "of another name": ours.sign(tmp_path / "name", name="else"),
    }

    async def test() -> None:
        for name, files in impostors.items():
            async with serving(by(files)) as address:
                assert (await code_of(watch, address, us))[0] is grpc.StatusCode.UNAVAILABLE, name

    run(test)


def test_a_certificate_does_not_replace_the_token_where_both_are_wanted(
    new_authority: NewAuthority, tmp_path: Path
) -> None:
    files = new_authority("ours").sign(tmp_path / "member")

    async def test() -> None:
        async with serving(by(files, OURS.tokens)) as address:
            assert (await code_of(watch, address, by(files)))[0] is grpc.StatusCode.UNAUTHENTICATED
            assert (await code_of(watch, address, by(files, OURS.tokens)))[0] is grpc.StatusCode.OK

    run(test)


@pytest.mark.parametrize(
    ("names", "party", "codes"),
    [
        ((), None, (SERVED, SERVED, SERVED)),
        (("worker",), None, (SERVED, REFUSED, REFUSED)),
        (("router", "operator"), None, (SERVED, SERVED, SERVED)),
        (("operator",), None, (SERVED, SERVED, REFUSED)),
        (("router", "operator"), Party.OPERATOR, (SERVED, SERVED, REFUSED)),
        (("worker",), Party.OPERATOR, (REFUSED, REFUSED, REFUSED)),
        ((), Party.ROUTER, (SERVED, REFUSED, SERVED)),
    ],
)
def test_a_certificate_may_say_what_its_holder_is_and_a_token_beside_it_must_agree(
    new_authority: NewAuthority, tmp_path: Path, names: tuple[str, ...], party: Party | None, codes: tuple[Any, ...]
) -> None:
    authority = new_authority("ours")
    mine = authority.sign(tmp_path / "mine", name=",DNS:".join(["diptych", *(f"{name}.diptych" for name in names)]))
    all_tokens, mine_only = (KNOWS_ALL.tokens, one_of(party).tokens) if party else (None, None)

    async def test() -> None:
        async with serving(by(authority.sign(tmp_path / "server"), all_tokens), own_host="10.0.0.1") as address:
            set_role = call_of("/diptych.v1.WorkerAdmin/SetRole", b"")
            session = call_of("/diptych.v1.Worker/Session", b"")
            found = [(await code_of(call, address, by(mine, mine_only)))[0] for call in (watch, set_role, session)]
            assert tuple(REFUSED if code is REFUSED else SERVED for code in found) == codes
            assert grpc.StatusCode.UNKNOWN not in found

    run(test)


def test_other_certificates_are_used_as_soon_as_they_are_there(new_authority: NewAuthority, tmp_path: Path) -> None:
    before, after = new_authority("before"), new_authority("after")
    us, them = by(before.sign(tmp_path / "us")), by(before.sign(tmp_path / "them"))

    async def test() -> None:
        async with serving(us) as address, open_channel(address, them) as lasting:
            await watch(lasting)
            late = by(after.sign(tmp_path / "late"))
            assert (await code_of(watch, address, late))[0] is grpc.StatusCode.UNAVAILABLE
            after.sign(tmp_path / "us")
            assert (await code_of(watch, address, late))[0] is grpc.StatusCode.OK
            assert (await code_of(watch, address, by(before.sign(tmp_path / "slow"))))[0] is (
                grpc.StatusCode.UNAVAILABLE
            )
            await watch(lasting)  # what is connected stays
            after.sign(tmp_path / "them")
            assert (await code_of(watch, address, them))[0] is grpc.StatusCode.OK

    run(test)


def test_a_member_comes_back_to_a_bootstrap_with_other_certificates(
    new_authority: NewAuthority, tmp_path: Path
) -> None:
    before, after = new_authority("before"), new_authority("after")
    us, them = by(before.sign(tmp_path / "us")), by(before.sign(tmp_path / "them"))

    async def test() -> None:
        async with serving(us) as address:
            member = asyncio.ensure_future(Registration([address], them, lambda: INSTANCE).run())
            await listed(address, us)
        for side in ("us", "them"):
            after.sign(tmp_path / side)
        async with serving(us, port=int(address.rpartition(":")[2])):
            await listed(address, us)
            await cancel([member])

    run(test)


async def listed(address: str, trust: Trust) -> None:
    """Wait until bootstrap lists somebody."""
    async with open_channel(address, trust) as channel:
        async for update in bootstrap_pb2_grpc.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest()):
            if update.upserts:
                return


def test_files_that_do_not_belong_together_are_refused_at_once(new_authority: NewAuthority, tmp_path: Path) -> None:
    authority = new_authority("authority")
    one, other = authority.sign(tmp_path / "one"), authority.sign(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"tls.crt and .*tls.key are no certificate with its key: KEY_VALUES"):
        Tls(replace(one, key=other.key))
    with pytest.raises(ConfigError, match=r"tls.key holds no certificate of an authority"):
        Tls(replace(one, ca=one.key))


def test_a_half_replaced_certificate_changes_nothing_until_its_key_is_there(
    new_authority: NewAuthority, tmp_path: Path
) -> None:
    authority = new_authority("authority")
    ours, coming = authority.sign(tmp_path / "ours"), authority.sign(tmp_path / "coming")
    tls = Tls(ours)
    former = tls.current()
    ours.cert.write_bytes(coming.cert.read_bytes())
    assert tls.current() == former
    ours.key.write_bytes(coming.key.read_bytes())
    assert tls.current().cert == coming.cert.read_bytes()


def test_a_file_that_vanishes_while_it_is_looked_at_changes_nothing(
    new_authority: NewAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = new_authority("authority")
    ours = authority.sign(tmp_path / "ours")
    tls = Tls(ours)
    former = tls.current()

    def vanish(*files: object, password: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", vanish)
    authority.sign(tmp_path / "ours")
    assert tls.current() == former


def test_a_certificate_that_ends_soon_is_said_once_a_day_until_it_is_replaced(
    new_authority: NewAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, day_s = new_authority("authority"), 86_400.0
    now_s = [time.time()]

    def said() -> list[str]:
        tls.current()
        words = [record.getMessage().partition(";")[0] for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return words

    tls = Tls(ours := authority.sign(tmp_path / "ours", days=30), lambda: now_s[0])
    assert said() == []
    now_s[0] += 17 * day_s
    assert said() == [f"the certificate {ours.cert} ends in 13.0 days"]
    assert said() == []
    now_s[0] += 14 * day_s
    assert said() == [f"the certificate {ours.cert} has ended: nobody connects with it"]
    authority.sign(tmp_path / "ours", days=60)
    now_s[0] += day_s
    assert said() == []
