"""What operators may write, and what they are told when it is wrong."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.router.keys.keyring import ApiKey, digest_of, parse_keyring

DIGEST = digest_of("secret").hex()
LIMITED = f"""
[alice]
sha256 = "{DIGEST.upper()}"
max_concurrent = 2
requests_per_minute = 60
tokens_per_minute = 1000

["ops.team"]
sha256 = "{digest_of("other").hex()}"
admin = true
max_priority = 10
share_cache = "alice"
"""


def test_keys_are_found_by_their_digest() -> None:
    assert parse_keyring(LIMITED, "keys") == {
        digest_of("secret"): ApiKey("alice", False, 2, 60, 1000),
        digest_of("other"): ApiKey("ops.team", admin=True, max_priority=10, share_cache="alice"),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[alice", "keys is no TOML"),
        ('["a b"]\nsha256 = "00"', "a name takes up to 64"),
        ("alice = 3", "needs sha256"),
        ('[alice]\nsha256 = "secret"', "needs sha256, 64 hexadecimal digits, as `diptych keys new alice` prints them"),
        (f"[alice]\nsha256 = {'1' * 64}", "needs sha256, 64 hexadecimal digits"),
        (f'[alice]\nsha256 = "{DIGEST}"\nlimit = 3', "unknown: limit; there is: admin, max_concurrent"),
        (f'[alice]\nsha256 = "{DIGEST}"\nmax_priority = 101', "max_priority is a whole number from 0 to 100"),
        (f'[alice]\nsha256 = "{DIGEST}"\nslo_tiers = []', "slo_tiers is a list of tiers"),
        (f'[alice]\nsha256 = "{DIGEST}"\nslo_tiers = ["two words"]', "slo_tiers is a list of tiers"),
        (f'[alice]\nsha256 = "{DIGEST}"\nmax_priority = true', "max_priority is a whole number from 0 to 100"),
        (f'[alice]\nsha256 = "{DIGEST}"\nshare_cache = ""', "share_cache is the name of a group, which takes up to 64"),
        (f'[alice]\nsha256 = "{DIGEST}"\nshare_cache = true', "share_cache is the name of a group"),
        (f'[alice]\nsha256 = "{DIGEST}"\nadmin = 1', "admin is true or false"),
        (f'[alice]\nsha256 = "{DIGEST}"\nmax_concurrent = 0', "max_concurrent is a whole number, at least 1"),
        (f'[alice]\nsha256 = "{DIGEST}"\ntokens_per_minute = true', "tokens_per_minute is a whole number"),
        (f'[a]\nsha256 = "{DIGEST}"\n[b]\nsha256 = "{DIGEST}"', "a and b have the same key: make another one"),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keyring(text, "keys")
    assert words in str(caught.value)
