"""Keys: their file, their check, and the cache domain and share that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ParameterError
from paceline.serve.keys import EVERYBODY, KeyRing, read_keys


def key_file(directory: Path, data: bytes) -> str:
    path = directory / "keys"
    path.write_bytes(data)
    return str(path)


def test_a_file_has_a_key_a_line_with_or_without_a_name(tmp_path: Path) -> None:
    ring = read_keys(key_file(tmp_path, b"# ours\n\nann: secret-a\n  secret-b  \n"))
    assert ring.num_clients == 2
    found = [ring.client_of(key) for key in ("secret-a", "secret-b")]
    assert [client and client.name for client in found] == ["ann", "key2"]
    assert not ring.is_open


@pytest.mark.parametrize("key", [None, "", "secret", "secret-aa", "ann", "\u20ac"])
def test_a_wrong_key_is_nobodys(key: str | None) -> None:
    assert KeyRing({"ann": "secret-a"}).client_of(key) is None


def test_without_keys_everybody_is_let_in() -> None:
    assert KeyRing({}).client_of(None) is EVERYBODY
    assert KeyRing({}).num_clients == 1


def test_clients_have_domains_that_follow_from_their_keys_and_do_not_tell_them() -> None:
    ring, again = KeyRing({"a": "x1", "b": "x2"}), KeyRing({"c": "x1"})
    a, b, c = ring.client_of("x1"), ring.client_of("x2"), again.client_of("x1")
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.cache_domain == c.cache_domain != b.cache_domain
    assert "x1" not in a.cache_domain


@pytest.mark.parametrize(
    "data",
    [b"", b"# none\n", b"a: x\na: y\n", b"a: x\nb: x\n", b"a:\n", b": x\n", b"a: x y\n", b"a: \xff\n", "é".encode()],
)
def test_a_bad_file_is_an_error_that_tells_no_key(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ParameterError) as caught:
        read_keys(key_file(tmp_path, data))
    assert caught.value.field == "api_key_file"
