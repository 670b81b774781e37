"""Loading without trust: nothing of a model folder is run, nothing is unpickled, no weight is made up; conversions."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftree.cli.main import run
from draftree.errors import DraftreeWarning, ModelFileError, PromptError, RunError, UnsupportedModelError
from draftree.models import memory
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface import hf_loading
from draftree.models.huggingface.hf_loading import cache_folder, load_stock
from draftree.models.loading import load
from draftree.text.encoding import encode, user

from ..references import extended
from ..tiny import causal_logits, save_gguf, save_tiny, tiny

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversions of the test go to a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def change(folder: Path, file: str, **values: object) -> None:
    """Set keys of a JSON file of a folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Code


def with_code(folder: Path, marker: Path, needed: str = "") -> Path:
    """Give a model folder Python of its own wherever transformers would take some.

    Args:
        marker: written by any of the code that runs.
        needed: "model" or "tokenizer" is of a class that transformers does not have.
    """
    save_tiny(folder)
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for file in ("own.py", "custom_generate/generate.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(code)
    change(
        folder,
        "config.json",
        model_type="own" if needed == "model" else "llama",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        attn_implementation="own/kernel",
    )
    own = {"tokenizer_class": "Own"} if needed == "tokenizer" else {}
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, **own)
    return folder


COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "a", "--json", "--target", "MODEL"],
    "draft": ["generate", "a", "--json", "--target", "GOOD", "--drafter", "MODEL"],
    "chat": ["chat", "MODEL"],
    "info": ["info", "MODEL"],
    "profile": ["profile", "MODEL"],
    "calibrate": ["calibrate", "--prompts", "PROMPTS", "--out", "OUT", "--target", "MODEL"],
    "train head": ["train", "head", "MODEL", "--prompts", "PROMPTS", "--out", "OUT"],
    "train classifier": ["train", "classifier", "--prompts", "PROMPTS", "--out", "OUT", "--target", "MODEL"],
    "bench": ["bench", "--suite", "SUITE", "--out", "OUT", "--target", "MODEL"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_the_code_of_a_model_folder(
    command: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asked on standard input whether to run it, took a piped "y" for consent, and the question was
    printed where --json belongs."""
    marker = tmp_path / "ran"
    places = {
        "MODEL": with_code(tmp_path / "model", marker, needed="model"),
        "GOOD": save_tiny(tmp_path / "good"),
        "PROMPTS": tmp_path / "prompts.txt",
        "SUITE": tmp_path / "suite.jsonl",
        "OUT": tmp_path / "out",
    }
    places["PROMPTS"].write_text("".join(f"the cat {i}\n" for i in range(40)))
    places["SUITE"].write_text(json.dumps({"prompt": "the cat"}) + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    capsys.readouterr()
    assert run([str(places.get(word, word)) for word in COMMANDS[command]]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "code of its own" in printed.err.splitlines()[-1]
    assert str(places["MODEL"]) in printed.err.splitlines()[-1]
    assert not marker.exists()


def test_code_beside_a_model_that_transformers_has_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    loaded = load(str(with_code(tmp_path / "model", tmp_path / "ran")))
    assert loaded.capabilities.architecture == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_needs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ModelFileError, match="tokenizer: .*Python code"):
        load(str(with_code(tmp_path / "model", tmp_path / "ran", needed="tokenizer")))
    assert not (tmp_path / "ran").exists()


class Marks:
    """Leaves a trace where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("named", [False, True], ids=["weights", "named by the config"])
def test_nothing_is_unpickled(named: bool, folder: Path, tmp_path: Path) -> None:
    file = "adapter_model.bin" if named else "pytorch_model.bin"
    torch.save(Marks(tmp_path / "ran"), folder / file)
    if named:
        change(folder, "config.json", transformers_weights=file)
    else:
        (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=file):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


def test_an_adapter_is_not_left_out(folder: Path) -> None:
    """The base model alone was loaded where peft is not installed."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="adapter"):
        load(str(folder))


# Weights

NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("read", [load, load_stock])
@pytest.mark.parametrize("lacking", [[NORM], ["lm_head.weight"], ["model.embed_tokens.weight"], [NORM, UP]])
def test_a_checkpoint_without_a_weight_is_refused_by_its_name(
    lacking: list[str], read: Callable[[str], object], folder: Path
) -> None:
    """transformers filled it with random numbers, and the text was nonsense."""
    change_weights(folder, lambda weights: [weights.pop(name) for name in lacking])
    with pytest.raises(ModelFileError) as caught:
        read(str(folder))
    assert all(name in str(caught.value) for name in (*lacking, f"lacks {len(lacking)} weight"))


def test_tied_weights_may_be_there_once(folder: Path) -> None:
    change(folder, "config.json", tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    model, _ = load_stock(str(folder))
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)  # type: ignore[arg-type]


def test_a_weight_of_another_size_is_refused_by_its_name(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({NORM: torch.zeros(3)}))
    with pytest.raises(ModelFileError, match=rf"{NORM} is \[3\], not \[32\]"):
        load(str(folder))


def test_weights_that_nothing_uses_cost_a_warning(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.warns(DraftreeWarning, match=r"model\.extra\.weight"):
        load(str(folder))


# Damage

CONFIGS: list[tuple[str, Any]] = [
    ("hidden_size", "abc"),
    ("hidden_size", [1, 2]),
    ("vocab_size", None),
    ("vocab_size", -1),
    ("num_attention_heads", 0),
    ("num_hidden_layers", float("inf")),
    ("max_position_embeddings", -1),
    ("sliding_window", "abc"),
    ("rope_parameters", [1]),
    ("model_type", 3),
    ("eos_token_id", {"a": 1}),
]


@pytest.mark.parametrize(("key", "value"), CONFIGS, ids=str)
def test_a_config_with_a_value_of_another_kind_is_one_line(key: str, value: object, folder: Path) -> None:
    change(folder, "config.json", **{key: value})
    if key == "eos_token_id":
        change(folder, "generation_config.json", **{key: None})
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")


CONTENTS = {"empty": b"", "cut": b"{", "list": b"[]", "null": b"null", "deep": b"[" * 10**5, "binary": b"\x80\x00\xff"}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_one_line(file: str, content: str, folder: Path) -> None:
    """A damaged tokenizer ended in a traceback; a damaged generation_config.json was left out without a word, and its
    end-of-sequence tokens with it."""
    (folder / file).write_bytes(CONTENTS[content])
    with pytest.raises(ModelFileError) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_one_line(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with pytest.raises(ModelFileError, match="tokenizer"):
        load(str(folder))


TEMPLATES = ("{% if %}", "{{ messages.nothing.more }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_damaged_chat_template_is_one_line(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(PromptError, match="chat template"):
        encode(load(str(folder)).tokenizer, user("the cat"))


# Conversions


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, capsys: Captured) -> None:
    path = save_gguf(tmp_path / "tiny.gguf")
    first, second = load_stock(str(path))[0], load_stock(str(path))[0]
    assert capsys.readouterr().err.count("Converting") == 1
    for model in (first, second):
        assert torch.allclose(causal_logits(model, [5, 6]), causal_logits(tiny(), [5, 6]), atol=1e-4)
    assert len(list(cache.iterdir())) == 1


def test_a_gguf_file_without_a_tensor_is_refused_by_its_name(tmp_path: Path, cache: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", lacking=["blk.1.ffn_up.weight"])
    with pytest.raises(ModelFileError, match=UP):
        load(str(path), backend="transformers")
    assert not list(cache.iterdir())


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "another file"])
def test_files_that_differ_in_the_middle_are_told_apart(elsewhere: bool, tmp_path: Path, cache: Path) -> None:
    """Files of one size with the same first and last MiB shared one conversion, and the second had the weights of the
    first."""
    path = save_gguf(tmp_path / "tiny.gguf")
    before = load_stock(str(path))[0]
    content = bytearray(path.read_bytes())
    stat = path.stat()
    weight = tiny().state_dict()[UP].numpy().tobytes()
    at = content.index(weight)
    content[at : at + len(weight)] = bytes(len(weight))
    if elsewhere:
        (tmp_path / "other").mkdir()
        path = tmp_path / "other" / "tiny.gguf"
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (not elsewhere)))
    assert before.state_dict()[UP].any()
    assert not load_stock(str(path))[0].state_dict()[UP].any()


def cut(folder: Path) -> None:
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])


def lose(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def lose_a_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(NORM))


def spoil_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("damage", [cut, lose, lose_a_weight, spoil_the_tokenizer])
def test_a_damaged_conversion_is_named(damage: Callable[[Path], None], tmp_path: Path, cache: Path) -> None:
    """The command failed at every start, and did not say what to delete."""
    path = save_gguf(tmp_path / "tiny.gguf")
    load(str(path), backend="transformers")
    (conversion,) = cache.iterdir()
    damage(conversion)
    with pytest.raises(ModelFileError, match=f"delete {conversion}"):
        load(str(path), backend="transformers")
    shutil.rmtree(conversion)
    loaded = load(str(path), backend="transformers")
    row = prefill(loaded, [5])
    assert torch.allclose(
        extended(loaded, [row], [Nodes.chain([6])])[0, 0], causal_logits(tiny(), [5, 6])[1], atol=1e-3
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_conversion_leaves_nothing(
    error: type[BaseException], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: PreTrainedModel, place: Path, **_: object) -> None:
        (place / "half").touch()
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", stop)
    with pytest.raises((error, RunError)):
        load(str(save_gguf(tmp_path / "tiny.gguf")), backend="transformers")
    assert not list(cache.iterdir())


def test_what_a_killed_conversion_left_is_no_conversion(tmp_path: Path, cache: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf")
    left = cache / f"{path.stem}-{hf_loading._identity(path)}.part"
    left.mkdir(parents=True)
    (left / "half").touch()
    load(str(path), backend="transformers")
    (conversion,) = cache.iterdir()
    assert conversion.suffix != ".part" and not (conversion / "half").exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left"), Exception("full")],
    ids=["config", "weights", "tokenizer"],
)
def test_a_full_disk_is_one_line(
    error: Exception, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each part of a model is written by another library, whose errors for a full disk have nothing in common; some
    ended in a traceback."""

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert run(["info", str(save_gguf(tmp_path / "tiny.gguf")), "--backend", "transformers"]) == 1
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert str(cache) in complaint
    assert "make room" in complaint
    assert not list(cache.iterdir())


@pytest.mark.parametrize("short", ["memory", "disk"])
def test_a_conversion_for_which_there_is_no_room_does_not_begin(
    short: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Four bytes a weight: the kernel ended the process, or the disk was full after minutes."""
    size, path = 4 * sum(weight.numel() for weight in tiny().parameters()), save_gguf(tmp_path / "tiny.gguf")
    if short == "memory":
        monkeypatch.setattr(memory, "free_memory", lambda: size)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    assert run(["info", str(path), "--backend", "transformers"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "Converting" not in complaint
    assert all(part in complaint for part in ("tiny.gguf", "float32", " GB are free"))
    assert not list(cache.iterdir())


def test_a_conversion_of_another_process_is_waited_for(tmp_path: Path, cache: Path, capsys: Captured) -> None:
    path = str(save_gguf(tmp_path / "tiny.gguf"))
    cache.parent.mkdir(parents=True)
    with ThreadPoolExecutor(2) as both, FileLock(cache.with_suffix(".lock")):
        loaded = [both.submit(load, path, backend="transformers") for _ in range(2)]
        assert not wait(loaded, timeout=0.2).done
    assert all(each.result().capabilities.parameters for each in loaded)
    assert capsys.readouterr().err.count("Converting") == 1


def test_transformers_loads_one_model_at_a_time(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """It swaps a method of all its models while it loads one. Two loads that overlapped left it swapped, and each model
    of tied embeddings that came later had random ones."""
    read, loading, most = AutoModelForCausalLM.from_pretrained, list[None](), list[int]()

    def watched(*args: Any, **options: Any) -> Any:
        loading.append(None)
        most.append(len(loading))
        time.sleep(0.05)
        try:
            return read(*args, **options)
        finally:
            loading.pop()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(3) as threads:
        assert len([*threads.map(lambda _: load(model), range(3))]) == 3
    assert most == [1, 1, 1]
