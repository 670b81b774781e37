"""Models by their names on a hub, downloaded from a mirror that runs here."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from pathlib import Path

import pytest

from draftree.errors import UnknownNameError
from draftree.models.model_files import HubName, chosen, hub_name

from ..tiny_gguf import write

PARTS = ["a-q8_0-00001-of-00002.gguf", "a-q8_0-00002-of-00002.gguf"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Mirror(ThreadingHTTPServer):
    """A hub with repositories of files.

    Attributes:
        repositories: name -> file -> content.
        asked: method of each request for a file.
        torn: so many answers to come end half-way.
        status: of all answers; 200: as the request deserves.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories = repositories
        self.asked: list[str] = []
        self.torn = 0
        self.status = 200


class _Answers(BaseHTTPRequestHandler):
    server: Mirror

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.status != 200:
            why = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(self.server.status, b"", why)
        if found := re.fullmatch(r"/api/models/(.+)/tree/.+", path):
            held = self.server.repositories[found[1]]
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in held]
            return self._send(200, dumps(tree).encode(), {})
        if found := re.fullmatch(r"/api/models/(.+?)(?:/revision/main)?", path):
            files = self.server.repositories.get(found[1])
            if files is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if found[1].endswith("gated"):
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            siblings = [{"rfilename": name} for name in files]
            about = {"id": found[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            return self._send(200, dumps(about).encode(), {})
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        content = self.server.repositories.get(found[1], {}).get(found[2]) if found else None
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        self.server.asked.append(self.command)
        self._send(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        return None

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if self.server.torn and len(body) > 1000:
                self.server.torn -= 1
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            self.wfile.write(body)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    file = tmp_path_factory.mktemp("hub") / "tiny.gguf"
    write(file)
    content = file.read_bytes()
    half = len(content) // 2
    served = Mirror(
        {
            "org/tiny-GGUF": {"README.md": b"#", "tiny-Q4_K_M.gguf": content, "tiny-Q8_0.gguf": content[:64]},
            "org/parts-GGUF": {
                "q8_0/big-q8_0-00001-of-00002.gguf": content,
                "q8_0/big-q8_0-00002-of-00002.gguf": content,
            },
            "org/torn-GGUF": {"torn.gguf": content},
            "org/none": {"README.md": b"#"},
            "org/gated": {"a.gguf": content[:half]},
        }
    )
    threading.Thread(target=served.serve_forever, daemon=True).start()
    with served:
        yield served
        served.shutdown()


ASK = (
    "import sys, warnings; from draftree.errors import DraftreeError, DraftreeWarning\n"
    "from draftree.models.model_files import gguf_path\n"
    "warnings.filterwarnings('ignore'); warnings.filterwarnings('always', category=DraftreeWarning)\n"
    "warnings.showwarning = lambda message, *_, **__: print(message)\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(gguf_path(name))\n"
    "    except DraftreeError as error: print(error)\n"
)
FETCH = (
    "import sys; from huggingface_hub import snapshot_download\n"
    "print(snapshot_download(sys.argv[1], allow_patterns=sys.argv[2]))\n"
)


def run(mirror: Mirror | None, home: Path, *words: str, program: str = ASK) -> list[str]:
    """What a new process says of names: the file that it found, with its warnings, or its error."""
    endpoint = "http://127.0.0.1:9" if mirror is None else f"http://127.0.0.1:{mirror.server_port}"
    own = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program, *words], env=own, capture_output=True, text=True)  # noqa: S603, PLW1510
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_files_are_downloaded_once_and_found_again_without_a_hub(mirror: Mirror, tmp_path: Path) -> None:
    names = "hf.co/org/tiny-GGUF", "https://huggingface.co/org/tiny-GGUF/:q8_0", "hf.co/org/parts-GGUF:Q8_0"
    first = run(mirror, tmp_path, *names)
    assert [Path(path).name for path in first] == ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "big-q8_0-00001-of-00002.gguf"]
    assert all(Path(path).is_file() for path in first)
    assert Path(first[2]).with_name("big-q8_0-00002-of-00002.gguf").is_file()
    mirror.asked.clear()
    assert run(mirror, tmp_path, *names) == first
    assert "GET" not in mirror.asked
    assert run(None, tmp_path, *names) == first


def test_a_hub_that_fails_costs_nothing_that_is_here(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reached, and the file on this machine was said not to be there."""
    names = "hf.co/org/tiny-GGUF", "hf.co/org/parts-GGUF:Q8_0"
    first = run(mirror, tmp_path, *names)
    for status in (401, 429, 500, 503):
        monkeypatch.setattr(mirror, "status", status)
        *found, missing = run(mirror, tmp_path, *names, "hf.co/org/torn-GGUF")
        assert found == first
        assert missing.startswith("hf.co/org/torn-GGUF cannot be downloaded, and is not here: ")
        assert str(status) in missing
    Path(first[1]).with_name("big-q8_0-00002-of-00002.gguf").unlink()
    assert "is not here" in run(mirror, tmp_path, names[1])[0]


@pytest.mark.parametrize("whole_list", [False, True])
def test_without_a_hub_what_is_on_this_machine_is_named(whole_list: bool, mirror: Mirror, tmp_path: Path) -> None:
    """Another quantisation was taken for the usual one without a word, or said to be all that the repository has; and
    where the hub's list of files is kept, nothing that is here was found."""
    if whole_list:
        (folder,) = run(mirror, tmp_path, "org/tiny-GGUF", "*Q8_0*", program=FETCH)
        kept = str(Path(folder, "tiny-Q8_0.gguf"))
    else:
        (kept,) = run(mirror, tmp_path, "hf.co/org/tiny-GGUF:Q8_0")
    names = [f"hf.co/org/tiny-GGUF{quantisation}" for quantisation in (":Q8_0", "", ":Q4_K_M")]
    named, warned, unnamed, other = run(None, tmp_path, *names)
    assert named == unnamed == kept
    assert "tiny-Q8_0" in warned and "Connection refused" in warned
    assert other == (
        "hf.co/org/tiny-GGUF:Q4_K_M cannot be downloaded ([Errno 111] Connection refused), and on this machine there "
        "is tiny-Q8_0: give hf.co/org/tiny-GGUF:FILE with one of these"
    )


def test_a_torn_download_is_made_whole(mirror: Mirror, tmp_path: Path) -> None:
    mirror.torn, name = 1, "hf.co/org/torn-GGUF"
    (path,) = run(mirror, tmp_path, name)
    assert Path(path).read_bytes() == mirror.repositories["org/torn-GGUF"]["torn.gguf"]


def test_what_is_not_there_is_an_error_of_a_line(mirror: Mirror, tmp_path: Path) -> None:
    assert run(mirror, tmp_path, "hf.co/org/nothing", "hf.co/tiny", "hf.co/org/gated", "hf.co/org/none") == [
        "no repository 'org/nothing': give hf.co/ORG/NAME:QUANTISATION",
        "no repository 'tiny': give hf.co/ORG/NAME:QUANTISATION",
        "hf.co/org/gated asks for its terms to be accepted: do so on its page, and set HF_TOKEN",
        "hf.co/org/none is not there: the repository has no GGUF file: give hf.co/org/none:QUANTISATION or :FILE",
    ]
    (unreached,) = run(None, tmp_path, "hf.co/org/tiny-GGUF")
    assert unreached == "hf.co/org/tiny-GGUF cannot be downloaded, and is not here: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("wanted", "files", "found"),
    [
        (None, ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-f16.gguf"], ["a-Q4_K_M.gguf"]),
        (None, ["a.gguf", "README.md"], ["a.gguf"]),
        ("q8_0", ["a-Q4_K_M.gguf", "a-Q8_0.gguf"], ["a-Q8_0.gguf"]),
        ("Q4_K", ["a.Q4_K.gguf", "a.Q4_K_M.gguf"], ["a.Q4_K.gguf"]),
        ("IQ4_XS", ["IQ4_XS/a-IQ4_XS.gguf", "a-Q8_0.gguf"], ["IQ4_XS/a-IQ4_XS.gguf"]),
        ("a-Q8_0.gguf", ["a-Q8_0.gguf", "a-Q8_0-new.gguf"], ["a-Q8_0.gguf"]),
        ("Q8_0", ["a-q8_0-00002-of-00002.gguf", "a-q8_0-00001-of-00002.gguf"], PARTS),
    ],
)  # fmt: skip
def test_a_quantisation_or_a_name_chooses_a_file(wanted: str | None, files: list[str], found: list[str]) -> None:
    assert chosen(HubName("org/a", wanted), files) == found


@pytest.mark.parametrize(
    ("wanted", "files", "message"),
    [
        (None, ["a-Q3_K_M.gguf", "a-Q5_0.gguf"], "a-Q3_K_M, a-Q5_0: .*hf.co/org/a:"),
        ("Q4_K_M", ["a-Q5_0.gguf"], "hf.co/org/a:Q4_K_M .*a-Q5_0"),
    ],
)
def test_what_chooses_no_file_says_which_there_are(wanted: str | None, files: list[str], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        chosen(HubName("org/a", wanted), files)


def test_other_names_are_no_names_on_the_hub() -> None:
    assert [hub_name(name) for name in ("smollm2", "org/name", "hf.com/org/name", "./hf.co/org/name")] == [None] * 4
    assert hub_name("hf.co/org/name:Q4_0") == hub_name("https://hf.co/org/name:Q4_0") == HubName("org/name", "Q4_0")
