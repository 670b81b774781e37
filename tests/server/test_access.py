"""Who may send requests: keys as RFC 9110 has them, and the host that a request calls where there is no key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from .running import Running, fetched, posted, running

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
TOLD = {"prompt": "a b", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(keys=("secret", "sk-1_2.3~+/=")) as found:
        yield found


@pytest.fixture(scope="module")
def unguarded() -> Iterator[Running]:
    with running(hosts=("Models.lan:8000",)) as found:
        yield found


def answered(served: Running, sent: bytes) -> tuple[int, bytes]:
    """Status and body of raw bytes, whose connection ends with the answer."""
    host, port = served.url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(sent)
        while piece := connection.recv(65536):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer secret",
        b"bearer secret",
        b"BEARER secret",
        b"Bearer    secret",
        b"  Bearer secret  ",
        b"Bearer sk-1_2.3~+/=",
    ],
)
def test_the_scheme_is_in_any_case_and_spaces_are_many(guarded: Running, value: bytes) -> None:
    """ "bearer" in small letters was 401."""
    assert answered(guarded, GET + b"Authorization: " + value + b"\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "value",
    [
        b"secret",  # was taken
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearersecret",
        b"Bearer\tsecret",
        b"Bearer secret secret",
        b"Bearer secret,",
        b"Bearer secrets",
        b"Bearer secret2",
        b"Bearer SECRET",
        b"Bearer Bearer secret",
        b"Basic secret",
        b"Token secret",
        b"secre",
        b"Bearer secret\xe9",
        b"Bearer \xff\xfe",
        b"Bear\xe9r secret",
        b"Bearer \xef\xbc\x93",
        b"x" * 5000,
    ],
)
def test_all_else_is_401(guarded: Running, value: bytes) -> None:
    status, body = answered(guarded, GET + b"Authorization: " + value + b"\r\n\r\n")
    assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("values", [(b"Bearer secret", b"Bearer secret"), (b"Basic x", b"Bearer secret"), ()])
def test_one_key_is_sent_not_several_nor_none(guarded: Running, values: tuple[bytes, ...]) -> None:
    sent = GET + b"".join(b"Authorization: " + value + b"\r\n" for value in values) + b"\r\n"
    assert answered(guarded, sent)[0] == 401


def test_an_empty_key_opens_nothing() -> None:
    with running(keys=("",)) as served:
        for value in (b"Bearer ", b"Bearer", b""):
            assert answered(served, GET + b"Authorization: " + value + b"\r\n\r\n")[0] == 401


EVIL = [
    "a" * 9000,
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "127.0.0.1@evil.example",
]


@pytest.mark.parametrize("host", [*EVIL, "2130706433", "xn--80ak6aa92e.com", "[evil]", "[::1", "a b", "\xe9", ""])
@pytest.mark.parametrize("path", ["/v1/models", "/", "/metrics", "/health", "/draftree/about"])
def test_without_a_key_a_foreign_host_is_refused(unguarded: Running, host: str, path: str) -> None:
    """A web page whose name leads to 127.0.0.1 (DNS rebinding) could send requests and read answers."""
    sent = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1")
    status, body = answered(unguarded, sent)
    found = json.loads(body)["error"]
    assert status == 403 and found["code"] == "host_not_allowed" and "--allowed-host" in found["message"]
    assert len(found["message"]) < 1300


def test_it_is_refused_before_any_work(unguarded: Running) -> None:
    for host in EVIL:
        assert posted(unguarded, "/v1/completions", TOLD, {"Host": host})[0] == 403
    assert unguarded.idle


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:8000",
        "192.168.1.5:8000",  # of the machine around a container
        "models.lan",
        "MODELS.LAN:443",
    ],
)
def test_addresses_localhost_and_allowed_names_are_answered_whatever_the_port(unguarded: Running, host: str) -> None:
    assert fetched(unguarded, "/v1/models", {"Host": host})[0] == 200


def test_http_1_0_needs_no_host(unguarded: Running) -> None:
    assert answered(unguarded, b"GET /v1/models HTTP/1.0\r\n\r\n")[0] == 200


def test_with_a_key_any_host_is_answered(guarded: Running) -> None:
    """A proxy sends the name that it is called by, or the one that it has for its replicas."""
    assert (
        posted(guarded, "/v1/completions", TOLD, {"Host": "evil.example", "Authorization": "Bearer secret"})[0] == 200
    )


def test_a_star_allows_any_host() -> None:
    with running(hosts=("*",)) as served:
        assert fetched(served, "/v1/models", {"Host": "evil.example"})[0] == 200


def test_a_page_of_an_allowed_origin_calls_an_allowed_host() -> None:
    with running(origins=("http://page",)) as served:
        asked = {"Origin": "http://page"}
        assert fetched(served, "/v1/models", asked)[0] == 200
        assert fetched(served, "/v1/models", {**asked, "Host": "evil.example"})[0] == 403
