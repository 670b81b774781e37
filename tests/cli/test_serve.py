"""``draftree serve`` as a process: it starts, answers, ends when it is told to, and refuses what does not do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.cli.serve import _is_loopback, _listening
from draftree.installation import install_command

Captured = pytest.CaptureFixture[str]


def test_it_answers_until_it_is_told_to_end(model: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    command = [sys.executable, "-m", "draftree", "serve", model, "--port", "0", "--name", "mine", "--drafter", "lookup"]
    command += ["--method", "chain", "--api-key-file", str(tmp_path / "keys")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        body = json.dumps({"model": "mine", "prompt": "a b a b", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer two"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:  # noqa: S310
            assert json.loads(answer.read())["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGTERM)
        logged = process.stderr.read()
    assert process.returncode == 0
    assert "a b a b" not in logged and "POST /v1/completions" in logged


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "--port is 99999: use at most 65535"),
        (["--max-body", "0"], "--max-body is 0: use at least 1"),
        (["--client-timeout", "0"], "--client-timeout is 0.0: use more than 0"),
        (["--timeout", "-1"], "--timeout is -1.0: use more than 0"),
        (["--api-key-file", "nowhere"], "--api-key-file nowhere cannot be read"),
        (["--api-key", ""], "a key is empty"),
        (["--api-key", "two words"], "has spaces"),
        (["--host", ""], "--host is empty"),
        (["--rows", "0"], "--rows is 0: use at least 1"),
        (["--method", "magic"], "no method 'magic'"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, capsys: Captured) -> None:
    assert run(["serve", "no-model", *words]) == 2
    complaint = capsys.readouterr().err.strip()
    assert message in complaint and len(complaint.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "address", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("127.1", "127.0.0.1", True),
        ("0", "0.0.0.0", False),  # noqa: S104 - what is tested
        ("0x0", "0.0.0.0", False),  # noqa: S104
        ("0.0.0.0", "0.0.0.0", False),  # noqa: S104
    ],
)
def test_who_can_reach_a_server_is_decided_by_where_it_listens(host: str, address: str, loopback: bool) -> None:
    """``--host ''`` listened at all addresses, and the warning of it named none."""
    with _listening(host, 0) as listener:
        found = listener.getsockname()[0]
    assert found == address
    assert _is_loopback(found) is loopback


@pytest.mark.parametrize("address", ["::1", "::ffff:127.0.0.1", "127.0.0.2"])
def test_other_spellings_of_loopback_are_loopback(address: str) -> None:
    assert _is_loopback(address)


@pytest.mark.parametrize("address", ["::", "::ffff:10.0.0.1", "::ffff:0.0.0.0", "fe80::1%eth0", "10.0.0.1"])
def test_other_addresses_are_not(address: str) -> None:
    assert not _is_loopback(address)


def test_the_warning_names_the_address_that_it_listens_at(model: str) -> None:
    command = [sys.executable, "-m", "draftree", "serve", model, "--port", "0", "--host", "0", "--drafter", "none"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stderr is not None
        said = list[str]()
        for line in process.stderr:
            said.append(line)
            if "inspector at" in line:
                break
        process.terminate()
    assert any("anybody who reaches 0.0.0.0" in line for line in said)


def test_an_empty_file_of_keys_opens_nothing(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "keys").write_text("\n")
    assert run(["serve", "no-model", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(model: str, capsys: Captured) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(["serve", model, "--port", port, "--drafter", "lookup", "--method", "chain"]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.delitem(sys.modules, "draftree.server.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert run(["serve"]) == 2
    assert f"a server needs prometheus_client: {install_command('draftree[serve]')}" in capsys.readouterr().err
