"""Whose cached prefixes a request may find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.router.keys.cache_namespace import NOBODY, cache_namespace, group_owner, key_owner

names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True) | st.sampled_from(["a", "ab", "key", "group"])
owners = st.just(NOBODY) | names.map(key_owner) | names.map(group_owner)
salts = st.text(max_size=256) | st.sampled_from(["", "b", "ab", "key a", "group a"])


@given(st.lists(st.tuples(owners, salts), min_size=2, max_size=8, unique=True))
def test_two_owners_or_two_salts_have_two_namespaces(wanted: list[tuple[bytes, str]]) -> None:
    assert len({cache_namespace(owner, salt) for owner, salt in wanted}) == len(wanted)


@given(owners.filter(len), salts)
def test_a_namespace_is_short_and_no_salt_of_a_client_without_a_key(owner: bytes, salt: str) -> None:
    namespace = cache_namespace(owner, salt)
    assert len(namespace) == 17
    with pytest.raises(UnicodeDecodeError):
        namespace.decode()


@given(names)
def test_a_group_is_nobodys_own_namespace(name: str) -> None:
    assert key_owner(name) != group_owner(name)


@given(salts)
def test_without_keys_a_namespace_is_the_salt(salt: str) -> None:
    assert cache_namespace(NOBODY, salt) == salt.encode()


def test_namespaces_are_the_same_in_every_release() -> None:
    """Routers of different releases meet at the same workers."""
    assert cache_namespace(key_owner("alice"), "").hex() == "ff8d5c32500b68574b5869924f046c1a0a"
    assert cache_namespace(group_owner("research"), "salt").hex() == "ff370d5007d1d72508a9001dfa9abc88cb"
