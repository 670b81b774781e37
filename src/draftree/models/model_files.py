"""Names of models to files: the embedded default, GGUF files and folders on the disk, GGUF files of a hub.

``hf.co/ORG/NAME:QUANTISATION`` is a GGUF file of a hub, as other runners name it; other names are hub ids, which
transformers reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..artifacts import check_regular, user_path
from ..errors import ModelFileError, UnknownNameError, needs_extra
from ..installation import install_data
from .data_packages import shipped

DEFAULT_MODEL = "smollm2"
EMBEDDED = {DEFAULT_MODEL: "SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Name -> GGUF file of a data package."""


def gguf_path(name: str) -> Path | None:
    """The GGUF file of this name, downloaded if need be; None: it is no such file's."""
    if name in EMBEDDED:
        return _embedded(name)
    if (on_hub := hub_name(name)) is not None:
        return downloaded(on_hub)
    path = user_path(name)
    if path.suffix != ".gguf":
        return None
    try:
        return check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UnknownNameError(f"no such file: {name}: give a .gguf file that exists") from None
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror}: give a .gguf file") from None


def _embedded(name: str) -> Path:
    if files := shipped(EMBEDDED[name]):
        return files[0]
    raise UnknownNameError(f"model {name!r} is not installed: {install_data(name)}, or name another model")


def checkpoint(name: str) -> str:
    """The folder or hub id of this name, for transformers.

    Raises:
        UnknownNameError, ModelFileError: it can be neither.
    """
    path = user_path(name)
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ModelFileError(f"{name} is neither a folder nor a .gguf file: give one of these, or a hub id")
    if name.startswith((".", "/", "~")) or not name.strip():
        raise UnknownNameError(f"no such folder: {name!r}: give a model folder, a .gguf file or a hub id")
    if close := difflib.get_close_matches(name, EMBEDDED, n=1):
        raise UnknownNameError(f"no model {name!r}: did you mean {close[0]}?")
    return name


PREFERRED = "Q4_K_M"
"""The quantisation of a repository with several files where none is named."""
_NAME = re.compile(
    r"(?:https?://)?(?:hf\.co|huggingface\.co)/(?P<repository>[^:?#]*?)/?(?::(?P<wanted>.+))?", re.DOTALL
)
_PATIENCE = 10.0
"""Seconds until the hub counts as out of reach."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


class HubName(NamedTuple):
    """A repository, and which of its files: a quantisation or the name of a file; None: the usual one."""

    repository: str
    wanted: str | None

    def __str__(self) -> str:
        return f"hf.co/{self.repository}" + (f":{self.wanted}" if self.wanted else "")


def hub_name(name: str) -> HubName | None:
    """What a model's name means on the hub; None: it is no such name."""
    match = _NAME.fullmatch(name)
    return HubName(match["repository"], match["wanted"]) if match else None


@cache
def downloaded(name: HubName) -> Path:
    """The file on this machine, all its parts beside it; what is missing is downloaded, and a download goes on.

    The hub's folder, its mirror and offline use are set as everywhere: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.

    Raises:
        UnknownNameError: there is no such repository, or no such file in it.
        ModelFileError: the hub cannot be reached, or gives no access, and the file is not here.
        MissingPackageError: the package that downloads is missing.
    """
    with needs_extra("hub", str(name)):
        import huggingface_hub as hub
        from huggingface_hub import errors
    try:
        try:
            about = hub.HfApi().model_info(name.repository, timeout=_PATIENCE)
            files = [file.rfilename for file in about.siblings or ()]
        except errors.HfHubHTTPError:
            raise  # it was reached
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
            try:
                folder = Path(hub.snapshot_download(name.repository, local_files_only=True))
            except errors.LocalEntryNotFoundError:
                raise error from None  # why it is not reached says more
            files = [str(file.relative_to(folder)) for file in folder.rglob("*")]
        return [Path(hub.hf_hub_download(name.repository, part)) for part in chosen(name, files)][0]
    except errors.GatedRepoError:
        raise ModelFileError(f"{name} asks for its terms to be accepted: do so on its page, and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UnknownNameError(f"no repository {name.repository!r}: give hf.co/ORG/NAME:QUANTISATION") from None
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        why = str(error).strip().partition("\n")[0]
        raise ModelFileError(f"{name} cannot be downloaded, and is not here: {why}") from None


def chosen(name: HubName, files: Sequence[str]) -> list[str]:
    """The file that a name means, as its parts in order.

    Args:
        files: of the repository.

    Raises:
        UnknownNameError: there is none, or several.
    """
    stems: dict[str, list[str]] = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix.lower() == ".gguf" and "mmproj" not in path.name.lower():
            stems.setdefault(_PART.sub("", path.stem), []).append(file)
    matching = {stem: parts for stem, parts in stems.items() if _means(name.wanted or PREFERRED, stem, parts)}
    if name.wanted is None and not matching:
        matching = stems
    if len(matching) != 1:
        names = ", ".join(sorted(matching or stems)) or "no GGUF file"
        why = f"may be any of {names}" if matching else f"is not there: the repository has {names}"
        raise UnknownNameError(f"{name} {why}: give hf.co/{name.repository}:QUANTISATION or :FILE")
    (parts,) = matching.values()
    return parts


def _means(wanted: str, stem: str, parts: Sequence[str]) -> bool:
    """Whether it is the name of this file, or of the quantisation at a place of its own in it."""
    named = wanted.lower()
    if named.endswith(".gguf"):
        return named == f"{stem}.gguf".lower() or named in map(str.lower, parts)
    return re.search(rf"(?:^|[-._]){re.escape(named)}(?:$|[-.])", stem.lower()) is not None
