"""Settings of a server: their ranges, and the file they may come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.arguments import byte_size
from paceline.errors import AddressError, ParameterError
from paceline.serve.address import listen, url_of
from paceline.serve.configuration import Configuration, read_configuration
from paceline.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("port", "8000"),
        ("max_body_bytes", 0),
        ("max_header_bytes", 5),
        ("max_choices", 0),
        ("max_choices", True),
        ("max_stop", -1),
        ("max_connections", 0),
        ("max_prompt_tokens", 0),
        ("header_s", -1),
        ("body_s", float("inf")),
        ("send_s", None),
        ("shutdown_s", "soon"),
        ("shutdown_s", float("nan")),
        ("otel", "yes"),
        ("metrics_by_client", 1),
        ("host", 5),
        ("host", ""),
        ("served_name", 5),
        ("api_key_file", 5),
        ("allow_origins", "https://a.example"),
        ("allow_origins", (5,)),
    ],
)
def test_an_impossible_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        ServeSettings(**{name: value})
    assert caught.value.field == name


def test_a_file_says_model_server_and_engine(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(
        'model = "m"\n[server]\nport = 1\nallow_origins = ["a", "b"]\nmax_body_bytes = "2M"\n'
        '[engine]\nkv_memory_bytes = "1.5G"\nnum_threads = 2\n'
    )
    assert read_configuration(str(file), byte_size) == Configuration(
        "m",
        {"port": 1, "allow_origins": ("a", "b"), "max_body_bytes": 2 * 2**20},
        {"kv_memory_bytes": 3 * 2**29, "num_threads": 2},
    )


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("modell = 1", "modell", "known are model, server, engine"),
        ("[server]\nhots = 1", "server.hots", "known are host, port"),
        ("[engine]\nthreads = 1", "engine.threads", "num_threads"),
        ("model = 1", "model", "text"),
        ("server = 1", "server", "[server]"),
        ("[server", "config", "TOML"),
        ('[engine]\nkv_memory_bytes = "much"', "engine.kv_memory_bytes", "K, M or G"),
    ],
)
def test_a_file_that_says_something_else_is_an_error(tmp_path: Path, text: str, field: str, words: str) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(text)
    with pytest.raises(ParameterError) as caught:
        read_configuration(str(file), byte_size)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_file_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(ParameterError):
        read_configuration(str(file), byte_size)


def test_an_address_that_cannot_be_had_is_an_error_that_names_it() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(AddressError, match=f"127.0.0.1, port {port}: Address already in use$"):
            listen("127.0.0.1", port)
    with pytest.raises(AddressError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except AddressError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")
