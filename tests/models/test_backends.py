"""Which backend runs a GGUF file: the native engine, or the first other one that knows the file and the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.errors import (
    DraftreeError,
    DraftreeWarning,
    ModelFileError,
    NotNativeError,
    RunError,
    UnsupportedModelError,
)
from draftree.models import loading
from draftree.models.base import LanguageModel
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.loading import Backend, ModelOptions, load
from draftree.models.native.binding import open_library
from draftree.models.native.native_model import NativeModel

from .. import tiny_gguf

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of the test go to a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def backend_of(model: LanguageModel) -> str:
    return {NativeModel: "native", LlamaModel: "llama.cpp", HFModel: "transformers"}[type(model)]


def test_a_gguf_file_runs_on_the_native_engine(tmp_path: Path) -> None:
    assert backend_of(load(str(tiny_gguf.write(tmp_path / "tiny.gguf")))) == "native"


@pytest.mark.parametrize(
    ("architecture", "options", "found"),
    [
        ("llama", {"threads": 1}, "native"),
        ("llama", {"device": "cpu"}, "transformers"),
        ("baichuan", {}, "llama.cpp"),
        ("baichuan", {"threads": 1}, "llama.cpp"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* runs on llama.cpp")
def test_the_first_backend_that_knows_file_and_options_runs_it(
    architecture: str, options: ModelOptions, found: str, tmp_path: Path, cache: None
) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture=architecture)
    assert backend_of(load(str(path), **options)) == found


def test_another_backend_than_the_native_engine_says_why(tmp_path: Path, capsys: Captured) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture="baichuan")
    why = "the native engine does not know architecture 'baichuan' of tiny.gguf"
    with pytest.warns(DraftreeWarning, match=f"tiny.gguf .*llama.cpp: {why}"):
        load(str(path))
    with pytest.raises(NotNativeError, match=f"{why}: .*llama.cpp"):
        load(str(path), backend="native")
    assert run(["generate", "--target", str(path), "the cat", "--max-tokens", "2"]) == 0
    assert f"runs on llama.cpp: {why}" in capsys.readouterr().err


def test_without_the_engines_library_llama_cpp_runs_the_file(
    tmp_path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.models.native.binding.LIBRARY", tmp_path / "libdraftree.so")
    open_library.cache_clear()
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    try:
        with pytest.warns(DraftreeWarning, match="llama.cpp: .*native engine"):
            assert backend_of(load(str(path))) == "llama.cpp"
        monkeypatch.setattr("draftree.models.loading.has_library", lambda: False)
        with pytest.warns(DraftreeWarning, match="transformers: .*native engine"):
            assert backend_of(load(str(path))) == "transformers"
    finally:
        open_library.cache_clear()


def test_where_transformers_fails_too_the_error_has_both_reasons_and_a_way_out(
    tmp_path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_library", lambda: False)
    path = str(tiny_gguf.write(tmp_path / "tiny.gguf", architecture="baichuan"))
    with pytest.raises(ModelFileError, match=r"'baichuan' .*draftree\[llama\].*cannot load"):
        load(path)
    for kind in (RunError, ModelFileError, UnsupportedModelError):

        def fail(name: str, kind: type[DraftreeError] = kind) -> LanguageModel:
            raise kind("it fails")

        with monkeypatch.context() as failing:
            failing.setitem(loading.BACKENDS, "transformers", Backend(fail, frozenset()))
            with pytest.raises(kind, match=r"'baichuan' .*draftree\[llama\].*it fails"):
                load(path)
