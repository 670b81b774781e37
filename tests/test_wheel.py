"""The wheel: what people install has everything that the package needs, and nothing of the repository."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)  # noqa: S603 - our own build
    return next(folder.glob("*.whl"))


def test_it_holds_the_package_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"draftree"}


def test_it_holds_the_files_of_the_inspector(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    page = ROOT / "src" / "draftree" / "server" / "page"
    assert {f"draftree/server/page/{path.name}" for path in page.iterdir()} <= set(names)


def test_installed_alone_it_runs_and_finds_its_head_and_its_classifiers(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which takes torch and the others from this one."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)  # noqa: S603 - our own wheel
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, env={}).stdout  # noqa: S603 - our own command

    assert "opt-tree" in run(str(tmp_path / "env" / "bin" / "draftree"), "methods")
    found = run(
        str(python),
        "-c",
        "import draftree; from draftree.models.heads.head_folder import SHIPPED as heads\n"
        "from draftree.policies.c2t import SHIPPED as nets\n"
        "print(draftree.__file__, *(p.name for p in heads.iterdir()), *(p.name for p in nets.iterdir()))",
    )
    assert str(site) in found
    assert "smollm2" in found
    assert ".json" in found
