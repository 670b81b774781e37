"""Tensors in a folder: files that are each written whole, and the recipe that all of them were made by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..artifacts import check_regular, is_bare, make_folder, read_bytes, write_whole
from ..errors import ConfigError, ModelFileError

RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a folder.

    Attributes:
        folder: made with the first file.
        what: is in them; their names begin with it.
        recipe: how it was made, as JSON holds it.
    """

    folder: Path
    what: str
    recipe: Mapping[str, Any]

    @property
    def files(self) -> dict[int, Path]:
        """By number, in this order."""
        return {int(path.stem.rpartition("-")[2]): path for path in sorted(self.folder.glob(f"{self.what}-*"))}

    def check(self, way_out: str) -> None:
        """Make sure that the folder has nothing, or files of this recipe.

        Raises:
            ConfigError: it has others.
        """
        path = self.folder / RECIPE
        try:
            same = json.loads(read_bytes(path)) == self.recipe
        except FileNotFoundError:
            same = is_bare(self.folder)
        except (OSError, ValueError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"{self.folder} holds {self.what} of other models, prompts or settings: repeat that command to go on "
                f"with them, or {way_out}"
            )

    def write(self, number: int, columns: Mapping[str, Tensor]) -> None:
        """Write a file, and before the first one the recipe.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        make_folder(self.folder)
        if not self.files:
            write_whole(self.folder / RECIPE, json.dumps(self.recipe, indent=1) + "\n")
        content = save({name: column.contiguous() for name, column in columns.items()})
        write_whole(self.folder / f"{self.what}-{number:08d}.safetensors", content)

    def read(self, path: Path, *names: str) -> list[Tensor]:
        """Columns of a file; what is large is read from the disk when it is used.

        Raises:
            ModelFileError: it cannot be read, or has not all of them.
        """
        try:
            with safe_open(check_regular(path), framework="pt") as file:
                return [file.get_tensor(name) for name in names]
        except (OSError, SafetensorError) as error:
            raise ModelFileError(
                f"cannot read {path}: {error}: remove it; its {self.what} will be drawn again, or left out where all "
                "were drawn"
            ) from None
