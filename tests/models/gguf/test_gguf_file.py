"""GGUF files: what is read of them, and the errors of those that cannot be run."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import Keys

from draftree.errors import DraftreeError, ModelFileError, UnsupportedModelError
from draftree.models.gguf.gguf_checks import check
from draftree.models.gguf.gguf_file import fingerprint, read, slot_bytes
from draftree.models.llama.library import F16, Q8_0, Log, Weights, check_decoder, open_library, unloadable

from ...tiny_gguf import HEAD, byte_level, split, write
from .retyped import Rewriter, number


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0")


def refused(path: Path) -> DraftreeError | None:
    """The error of a model that llama.cpp has loaded, or has not; None: it can be run."""
    library = open_library()
    library.listen()
    pointer = library.model_load_from_file(str(path).encode(), library.model_default_params())
    if not pointer:
        return unloadable(library, path)
    try:
        check_decoder(library, pointer, check(path))
    except DraftreeError as error:
        return error
    finally:
        library.model_free(pointer)
    return None


@pytest.mark.parametrize("weights", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_the_header_is_what_the_packages_own_reader_finds(tmp_path: Path, weights: str) -> None:
    path = write(tmp_path / "tiny.gguf", weights=weights)
    header, reader = check(path), gguf.GGUFReader(path)
    own = {field.name: field.contents() for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    stored = header.metadata.stored
    texts = {key: [text.decode() for text in found] for key, found in stored.items() if isinstance(found, list)}
    numbers = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in stored.items()}
    assert numbers | texts == own
    found = [(t.name, t.shape, t.kind, t.begin, t.size) for t in header.tensors]
    assert found == [
        (t.name, tuple(map(int, t.shape)), t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors
    ]


@pytest.mark.parametrize("architecture", ["llama", "mamba", "lfm2", "cohere2", "gemma3", "gpt-oss"])
def test_a_model_that_can_be_run_is_not_refused(tmp_path: Path, architecture: str) -> None:
    assert refused(write(tmp_path / "tiny.gguf", architecture=architecture)) is None


def test_other_files_are_no_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    for content in (b"", b"GG", b"PK\3\4 and more of it"):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=str(path)):
            check(path)
    with pytest.raises(ModelFileError, match="directory"):
        check(tmp_path)
    with pytest.raises(ModelFileError, match="No such file"):
        check(tmp_path / "none.gguf")


def test_an_incomplete_file_is_reported_with_its_sizes(file: Path, tmp_path: Path) -> None:
    """llama.cpp finds this out as well, after it has mapped the file, and gives a tensor's name as the reason."""
    whole, path = file.read_bytes(), tmp_path / "cut.gguf"
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelFileError, match=rf"{len(whole) - 1} bytes of {len(whole)}"):
        check(path)


def test_a_file_that_ends_anywhere_is_a_model_file_error(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "cut.gguf"
    begin = min(tensor.begin for tensor in check(file).tensors)
    for end in {*range(4, 400), *range(400, begin, 97), begin}:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelFileError):
            check(path)


def test_a_damaged_header_is_an_error_of_ours_or_none(file: Path, tmp_path: Path) -> None:
    whole, path, drawn = file.read_bytes(), tmp_path / "bad.gguf", random.Random(1)
    begin, errors = min(tensor.begin for tensor in check(file).tensors), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(drawn.choice((1, 4))):
            damaged[drawn.randrange(4, begin)] = drawn.choice((0, 1, 127, 255))
        path.write_bytes(damaged)
        try:
            header = check(path)
            fingerprint(header)
            slot_bytes(header, F16, F16)
        except DraftreeError:
            errors += 1
    assert errors > 50


@pytest.mark.parametrize(("version", "why"), [(1, "version 1"), (9, "version 9"), (0x03000000, "big-endian")])
def test_versions_that_llama_does_not_read(file: Path, tmp_path: Path, version: int, why: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + file.read_bytes()[8:])
    with pytest.raises(UnsupportedModelError, match=why):
        check(path)


def other(path: Path, architecture: str, fill: Callable[[gguf.GGUFWriter], Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "why"),
    [
        ("clip", "mmproj", "a multi-modal projector"),
        ("clip", "model", "a multi-modal projector"),
        ("llama", "adapter", "a LoRA adapter"),
        ("llama", "imatrix", "an importance matrix"),
        ("llama", "model", "no weights"),
    ],
)
def test_what_is_no_language_model(tmp_path: Path, architecture: str, kind: str, why: str) -> None:
    path = other(tmp_path / "other.gguf", architecture, lambda writer: writer.add_type(kind))
    with pytest.raises(ModelFileError, match=f"language model.*{why}"):
        check(path)


def test_an_architecture_that_llama_does_not_have_is_named(tmp_path: Path) -> None:
    error = refused(write(tmp_path / "tiny.gguf", architecture="hyperllama"))
    assert isinstance(error, UnsupportedModelError)
    assert "'hyperllama'" in str(error)
    assert "backend 'transformers'" in str(error)


def test_the_reason_is_known_though_another_has_taken_the_reports(tmp_path: Path) -> None:
    """xllamacpp's server does, in a process that uses both: every reason was "it gives no reason" after it."""
    heard = list[bytes]()
    library, other_log = open_library(), Log(lambda _level, text, _data: heard.append(text))
    library.log_set(other_log, None)
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        Weights(library, write(tmp_path / "tiny.gguf", lacking=["blk.1.ffn_up.weight"]))
    assert heard == []


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """llama.cpp's last complaint is that it has failed to load a model: the reason comes before."""
    error = refused(write(tmp_path / "tiny.gguf", lacking=["blk.1.ffn_up.weight"]))
    assert isinstance(error, ModelFileError)
    assert "blk.1.ffn_up.weight" in str(error)
    assert open_library().complaints == []


@pytest.mark.parametrize("architecture", ["t5", "t5encoder"])
def test_models_that_are_no_decoders(tmp_path: Path, architecture: str) -> None:
    error = refused(write(tmp_path / "tiny.gguf", architecture=architecture))
    assert isinstance(error, UnsupportedModelError)
    assert f"({architecture}) is an encoder" in str(error)


def test_models_of_any_quantization_seed_or_shape_have_fingerprints_of_their_own(file: Path, tmp_path: Path) -> None:
    found = [fingerprint(check(file))]
    for options in ({"weights": "F16"}, {"seed": 1}, {"layers": 1}, {"vocabulary": byte_level(extra=["<x>"])}):
        chosen: dict[str, Any] = {"weights": "Q8_0"} | options
        found.append(fingerprint(check(write(tmp_path / "other.gguf", **chosen))))
    assert len(set(found)) == 5
    assert {len(digest) for digest in found} == {16}


def test_a_copy_of_another_name_has_the_same_fingerprint(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    assert fingerprint(check(copy)) == fingerprint(check(file))


def test_the_first_and_the_last_byte_of_each_tensor_are_in_its_fingerprint(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "other.gguf"
    found = {fingerprint(check(file))}
    tensors = check(file).tensors
    for tensor in tensors:
        for at in (tensor.begin, tensor.begin + tensor.size - 1):
            changed = bytearray(whole)
            changed[at] ^= 1
            path.write_bytes(changed)
            found.add(fingerprint(check(path)))
    assert len(found) == 1 + 2 * len(tensors)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["default", "tool_use", "rag"], {"default": "default!", "tool_use": "tool_use!", "rag": "rag!"}),
        (["default"], "default!"),
        (["tool_use"], None),
    ],
)
def test_chat_templates_have_their_names(tmp_path: Path, names: list[str], expected: object) -> None:
    templates = [{"name": name, "template": f"{name}!"} for name in names]
    assert check(write(tmp_path / "tiny.gguf", template=templates)).chat_template == expected


def test_a_name_of_no_chat_template_is_passed_over(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template("plain")
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, ["missing"])

    assert read(other(tmp_path / "other.gguf", "llama", fill)).chat_template == "plain"


@pytest.mark.parametrize("key", ["tokenizer.chat_template.tool_use", "tokenizer.chat_templates"])
def test_chat_templates_and_their_names_are_texts(tmp_path: Path, key: str) -> None:
    templates = [{"name": name, "template": "plain"} for name in ("default", "tool_use")]
    path, copy = write(tmp_path / "tiny.gguf", template=templates), tmp_path / "copy.gguf"
    Rewriter(path).copy(copy, key, number(gguf.GGUFValueType.UINT32, 1))
    with pytest.raises(ModelFileError, match=key):
        assert check(copy).chat_template


def test_bytes_of_a_slot(file: Path) -> None:
    layers, width = 2, 2 * HEAD
    header = check(file)
    assert slot_bytes(header, F16, F16) == layers * width * (2 + 2)
    assert slot_bytes(header, Q8_0, F16) == layers * (width * 34 // 32 + width * 2)


def test_bytes_of_a_slot_of_layers_that_differ(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(2048)
        writer.add_block_count(3)
        writer.add_head_count([8, 8, 4])
        writer.add_head_count_kv([2, 0, 4])
        writer.add_embedding_length(256)
        writer.add_key_length(64)
        writer.add_value_length(32)
        writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))

    header = check(other(tmp_path / "tiny.gguf", "deci", fill))
    assert slot_bytes(header, F16, F16) == 6 * (64 + 32) * 2
    assert slot_bytes(header, Q8_0, F16) == 6 * (64 * 34 // 32 + 32 * 2)


def test_a_model_in_parts_is_read_from_all_of_them(file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path)
    assert {tensor.name for tensor in check(parts[0]).tensors} == {tensor.name for tensor in check(file).tensors}
    assert refused(parts[0]) is None
    own = fingerprint(check(parts[0]))
    content = bytearray(parts[1].read_bytes())
    content[-1] ^= 1
    parts[1].write_bytes(content)
    assert fingerprint(check(parts[0])) != own


def test_a_part_that_is_not_the_first_or_lacks_others(file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path)
    with pytest.raises(ModelFileError, match=f"part 2 of 2.*{parts[0].name}"):
        check(parts[1])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="part 1 of 2"):
        check(renamed)
    renamed.rename(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=parts[1].name):
        check(parts[0])
