"""What is loaded does not depend on its files any more: they are cut or written over in place, and nothing changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from draftree.models.native.header_reader import FORMATS
from tests import tiny, tiny_gguf
from tests.models.overwritten import DAMAGES
from tests.published import Recipe

ROOT = Path(__file__).parents[2]
NAMES = sorted(GGMLQuantizationType(kind).name for kind in FORMATS)
LEARNS = Recipe(kind="eagle", vocab=274, target_size=256, size=256, width=16, wide=64, drafted=tuple(range(1, 80, 3)))
OWN = replace(LEARNS, kind="eagle3", embeddings=True)


def write_gguf(folder: Path, weights: str, tied: bool, layers: int) -> Path:
    lacking = ("output.weight",) if tied else ()
    path = folder / f"{weights}{'-tied' if tied else ''}.gguf"
    return tiny_gguf.write(path, hidden=256, heads=8, context=64, weights=weights, lacking=lacking, layers=layers)


def make(folder: Path) -> list[str]:
    """Tied and untied models of each format of weights, models with draft heads, and a transformers model with one."""
    folder.mkdir()
    found = [str(write_gguf(folder, name, tied, 1)) for name in NAMES for tied in (True, False)]
    for name, tied in (("Q4_1", True), ("Q6_K", False)):
        for number, (recipe, style) in enumerate([(LEARNS, "midlayer"), (OWN, "speculators")]):
            (at := folder / f"{name}-{number}").mkdir()
            found.append(f"{write_gguf(at, name, tied, 3)},{recipe.save(at / 'head', style)}")
    stock = tiny.save_tiny(folder / "stock")
    head = replace(OWN, vocab=tiny.VOCAB, target_size=32, size=32, drafted=(1, 2, 3)).save(folder / "head")
    return [*found, f"{stock},{head}"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, str]]]:
    """How the process ended that loaded all models, and for each damage that it came to: model -> what it answered."""
    folder = tmp_path_factory.mktemp("models")
    names = [each.replace(str(folder / "none"), "@") for each in make(folder / "none")]
    for damage in DAMAGES.keys() - {"none"}:
        shutil.copytree(folder / "none", folder / damage)
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "tests.models.overwritten", str(folder), *names],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    digests = [dict(zip(names, json.loads(line), strict=True)) for line in done.stdout.splitlines()]
    return f"{done.returncode}: {done.stderr[-2000:]}", dict(zip(DAMAGES, digests, strict=False))


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "none"])
def test_what_is_loaded_outlives_its_files(damage: str, ended: tuple[str, dict[str, dict[str, str]]]) -> None:
    """A file that was cut ended the process by SIGBUS, and one that was written over in place changed the text.

    The native engine read embeddings and rows of output layers from it, transformers all weights of float32.
    """
    how, found = ended
    assert damage in found, how
    assert found[damage] == found["none"]
