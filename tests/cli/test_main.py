"""The command line through its entry point: what is printed where, and one line for each kind of bad input."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftree import progress
from draftree.cli import generate
from draftree.cli.main import run
from draftree.drafters.registry import DRAFTERS
from draftree.errors import ModelFileError
from draftree.models.llama import library
from draftree.policies.methods import METHODS
from draftree.verify.schemes import SCHEMES

from ..pairs import save_tree
from ..tiny import MAX_LENGTH, save_tiny
from ..tiny_gguf import Vocabulary, byte_level, write

Captured = pytest.CaptureFixture[str]


def _json(capsys: Captured, *arguments: str) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


def test_json_is_one_object_with_text_ids_and_figures(model: str, capsys: Captured) -> None:
    report = _json(capsys, "generate", "the cat in the hat", "--target", model, "--max-tokens", "12")
    assert set(report) == {"text", "token_ids", "finish_reason", "seed", "verification", "candidates", "lossy", "stats"}
    assert (report["verification"], report["lossy"]) == ("match", False)
    stats = report["stats"]
    assert isinstance(stats, dict)
    assert set(stats) >= {"tokens", "steps", "mal", "drafted", "accepted", "seconds", "tokens_per_second"}
    assert set(stats["seconds"]) == {"prefill", "draft", "verify", "other"}
    assert stats["tokens"] == len(report["token_ids"])  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_prints_the_text_of_ar_decoding(method: str, model: str, tmp_path: Path, capsys: Captured) -> None:
    asked = ["generate", "the cat in the hat", "--target", model, "--max-tokens", "20"]
    assert run([*asked, "--drafter", "none"]) == 0
    want = capsys.readouterr().out
    tree = ["--set", f"tree={save_tree(tmp_path / 'tree.json', model, 'self')}"] if method == "sequoia" else []
    assert run([*asked, "--method", method, "--drafter", "self", *tree]) == 0
    assert capsys.readouterr().out == want


def test_text_goes_to_standard_output_and_figures_to_standard_error(model: str, capsys: Captured) -> None:
    report = _json(capsys, "generate", "a b a b a b", "--target", model, "--max-tokens", "9")
    assert run(["generate", "a b a b a b", "--target", model, "--max-tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{report['text']}\n"
    assert "9 tokens in" in printed.err
    assert "MAL" in printed.err


def test_a_predicted_output_saves_passes_and_changes_no_text(model: str, tmp_path: Path, capsys: Captured) -> None:
    words = ("generate", "the cat in the hat", "--target", model, "--max-tokens", "24", "--method", "chain")
    plain = _json(capsys, *words, "--drafter", "lookup")
    (tmp_path / "told").write_text(str(plain["text"]))
    for drafter in (["--drafter", "lookup"], []):
        told = _json(capsys, *words, *drafter, "--prediction", str(tmp_path / "told"))
        assert told["token_ids"] == plain["token_ids"]
        assert told["stats"]["steps"] < plain["stats"]["steps"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, [], "cannot be read"),
        (b"", [], "is empty"),
        (b"\xff\xfe", [], "is not valid UTF-8"),
        (b"x", ["--drafter", "self"], "does not draft from --prediction: use lookup, or lookup+self"),
        (b"x", ["--beams", "2"], "--beams and --prediction"),
        (b"a b " * 200, ["--method", "chain"], "the prediction has"),
    ],
)
def test_a_prediction_that_does_not_do_is_one_line(
    content: bytes | None, more: list[str], message: str, model: str, tmp_path: Path, capsys: Captured
) -> None:
    if content is not None:
        (tmp_path / "told").write_bytes(content)
    words = ["generate", "a b", "--target", model, "--prediction", str(tmp_path / "told")]
    assert run([*words, *more]) == 2
    complaint = capsys.readouterr().err.strip()
    assert message in complaint and len(complaint.splitlines()) == 1


def test_answers_are_what_a_schema_or_a_regular_expression_says(model: str, tmp_path: Path, capsys: Captured) -> None:
    words = ("generate", "the cat in the hat", "--target", model, "--max-tokens", "24", "--temperature", "1")
    (tmp_path / "schema").write_text('{"enum": ["the cat", "a hat", 7]}')
    for drafter in ("lookup", "self", "none"):
        found = _json(capsys, *words, "--drafter", drafter, "--json-schema", str(tmp_path / "schema"), "--seed", "3")
        assert json.loads(str(found["text"])) in ("the cat", "a hat", 7)
        found = _json(capsys, *words, "--drafter", drafter, "--regex", "(cat|hat)[0-9]{3}", "--seed", "3")
        assert re.fullmatch("(cat|hat)[0-9]{3}", str(found["text"])) and found["finish_reason"] == "eos"


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, [], "cannot be read"),
        (b"{", [], "is no JSON"),
        (b'{"uniqueItems": true}', [], "uniqueItems"),
        (b'{"type": 3}', [], "json_schema cannot be used"),
        (b"{}", ["--regex", "a"], "--json-schema and --regex exclude each other"),
        (b"{}", ["--beams", "2"], "--beams and --json-schema"),
    ],
)
def test_a_schema_that_does_not_do_is_one_line(
    content: bytes | None, more: list[str], message: str, model: str, tmp_path: Path, capsys: Captured
) -> None:
    if content is not None:
        (tmp_path / "schema").write_bytes(content)
    assert run(["generate", "a b", "--target", model, "--json-schema", str(tmp_path / "schema"), *more]) == 2
    complaint = capsys.readouterr().err.strip()
    assert message in complaint and len(complaint.splitlines()) == 1


def test_a_dash_reads_the_prompt_from_standard_input(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = _json(capsys, "generate", "in and on", "--target", model, "--max-tokens", "9")["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("in and on"))
    assert _json(capsys, "generate", "-", "--target", model, "--max-tokens", "9")["token_ids"] == want


def test_raw_leaves_the_chat_template_out(model: str, capsys: Captured) -> None:
    asked = ("generate", "the cat", "--target", model, "--max-tokens", "9")
    assert _json(capsys, *asked)["token_ids"] != _json(capsys, *asked, "--raw")["token_ids"]


def test_a_seed_repeats_sampled_text(model: str, capsys: Captured) -> None:
    asked = ("generate", "the cat", "--target", model, "--max-tokens", "20", "--temperature", "1")
    one = _json(capsys, *asked)
    again = _json(capsys, *asked, "--seed", str(one["seed"]), "--drafter", "none")
    assert again["token_ids"] == one["token_ids"]
    assert _json(capsys, *asked)["token_ids"] != one["token_ids"]


def test_a_stop_string_ends_the_text_before_it(model: str, capsys: Captured) -> None:
    asked = ("generate", "the cat", "--target", model, "--max-tokens", "40")
    text = str(_json(capsys, *asked)["text"])
    stop = text[10:13]
    report = _json(capsys, *asked, "--stop", stop)
    assert report["text"] == text[: text.index(stop)]
    assert report["finish_reason"] == "stop"


def test_compare_reports_the_same_tokens(model: str, capsys: Captured) -> None:
    report = _json(capsys, "generate", "the cat", "--target", model, "--max-tokens", "20", "--compare")
    plain = report["ar"]
    assert isinstance(plain, dict)
    assert plain["same_tokens"] is True
    assert run(["generate", "the cat", "--target", model, "--max-tokens", "20", "--compare"]) == 0
    assert "the same text" in capsys.readouterr().err


def test_compare_sets_the_engine_beside_llama_cpp(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(write(tmp_path / "model.gguf"))
    asked = ["generate", "the cat", "--target", file, "--max-tokens", "8", "--raw", "--compare"]
    assert _json(capsys, *asked).keys() >= {"ar", "llama.cpp"}
    assert run(asked) == 0
    assert "as fast as llama.cpp" in capsys.readouterr().err
    assert "llama.cpp" not in _json(capsys, *asked, "--backend", "llama.cpp")
    monkeypatch.setattr(generate, "has_library", lambda: False)
    assert _json(capsys, *asked).keys() >= {"ar"} and run(asked) == 0
    assert "llama.cpp" not in capsys.readouterr().err


@pytest.mark.parametrize("why", ["version", "file"])
def test_compare_says_why_it_leaves_llama_cpp_out(
    why: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that had been decoded was lost to an error of the comparison."""

    def refuse(*_: object, **__: object) -> None:
        raise ModelFileError("llama.cpp cannot load the file: get it again")

    if why == "version":
        monkeypatch.setattr(library, "XLLAMACPP", "0")
        monkeypatch.setattr(library, "open_library", library.open_library.__wrapped__)
    else:
        monkeypatch.setattr(generate, "load_llama", refuse)
    file = str(write(tmp_path / "model.gguf"))
    asked = ["generate", "the cat", "--target", file, "--max-tokens", "8", "--raw", "--compare"]
    report = _json(capsys, *asked)
    assert "ar" in report and "llama.cpp" not in report
    assert run(asked) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("as fast as AR decoding" in line for line in lines)
    (said,) = (line for line in lines if line.startswith("draftree: "))
    assert "leaves llama.cpp out" in said and ("xllamacpp is " in said or "get it again" in said)


def test_show_trees_prints_each_step_with_its_accepted_path(model: str, capsys: Captured) -> None:
    asked = ["generate", "the cat", "--target", model, "--drafter", "self", "--max-tokens", "11", "--show-trees"]
    assert run([*asked, "--method", "chain"]) == 0
    printed = capsys.readouterr().out
    assert "step 1: 4 drafted, 4 accepted" in printed
    assert printed.count("✓") == 8


def test_settings_reach_the_method(model: str, capsys: Captured) -> None:
    asked = ("generate", "the cat", "--target", model, "--drafter", "self", "--max-tokens", "13", "--method", "chain")
    stats = _json(capsys, *asked, "--set", "depth=2")["stats"]
    assert isinstance(stats, dict)
    assert stats["drafted"] == [4, 4]


def test_info_says_what_was_found(model: str, capsys: Captured) -> None:
    assert run(["info", model]) == 0
    printed = capsys.readouterr().out
    found = ("LlamaForCausalLM", f"{MAX_LENGTH} tokens", "61 tokens", "self-test passed", "KiB a token")
    for what in found:
        assert what in printed
    for runner, passes in (("eager", "the model's own forward"), ("graph", "device cpu has no CUDA graphs")):
        assert run(["info", model, "--runner", runner]) == 0
        assert f"{'passes':17} {passes}\n" in capsys.readouterr().out


def test_methods_is_a_table_with_a_line_a_method(capsys: Captured) -> None:
    assert run(["methods"]) == 0
    sections = capsys.readouterr().out.split("\n\n")
    for section, names in zip(sections, (list(METHODS), list(SCHEMES), list(DRAFTERS)), strict=True):
        for name in names:
            assert sum(line.startswith(f"{name} ") for line in section.splitlines()) == 1
    lines = dict(line.split(maxsplit=1) for line in sections[0].splitlines()[1:])
    for method in METHODS.values():
        assert method.paper and method.use and lines[method.name] == f"{method.paper:29} {method.use}"
    assert max(map(len, sections[0].splitlines())) <= 132


def test_methods_prints_the_settings_of_one_of_them(capsys: Captured) -> None:
    assert run(["methods", "dynamic-width"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("--set ")] == [
        f"--set {key}={value}" for key, value in METHODS["dynamic-width"].settings.items()
    ]
    assert "nodes: 31" in out
    assert run(["methods", "dynamic-with"]) == 2
    assert "did you mean dynamic-width?" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_prints_greedy_text_unless_it_says_that_it_is_lossy(
    scheme: str, model: str, capsys: Captured
) -> None:
    asked = ["generate", "the cat in the hat", "--target", model, "--max-tokens", "20", "--drafter", "self"]
    assert run([*asked, "--verify", "match", "--method", "chain"]) == 0
    want = capsys.readouterr().out
    assert run([*asked, "--verify", scheme, "--method", "chain"]) == 0
    printed = capsys.readouterr()
    assert f"self, chain, {scheme}: " in printed.err
    assert ("lossy" in printed.err) == SCHEMES[scheme].lossy
    assert printed.out == want or SCHEMES[scheme].lossy
    report = _json(capsys, *asked, "--verify", scheme, "--method", "chain")
    assert (report["verification"], report["lossy"]) == (scheme, SCHEMES[scheme].lossy)


def test_comparing_a_scheme_that_draws_says_why_its_sampled_text_differs(model: str, capsys: Captured) -> None:
    asked = ["generate", "the cat in the hat", "--target", model, "--max-tokens", "20", "--drafter", "self"]
    sampled = ["--temperature", "1", "--seed", "1", "--method", "static", "--compare"]
    assert run([*asked, *sampled, "--verify", "multi-round"]) == 0
    assert "multi-round: another draw from the same distribution" in capsys.readouterr().err


def test_chat_remembers_and_resets_the_conversation(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        assert run(["chat", model, "--max-tokens", "6"]) == 0
        return capsys.readouterr().out.splitlines()

    assert len(talk("the cat", "", "the cat", "/exit", "the hat")) == 2
    first, second = talk("the cat", "the cat")
    again, reset = talk("the cat", "/reset", "the cat")[0], talk("the cat", "/reset", "the cat")[1]
    assert first == again == reset != second


def test_chat_goes_on_after_a_line_that_does_not_fit(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(["cat " * MAX_LENGTH, "the cat"])))
    assert run(["chat", model, "--max-tokens", "6"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert "shorten" in printed.err


BAD = {
    "unknown method": (["--method", "dynamic-widht"], "dynamic-width"),
    "unknown verification": (["--verify", "relax"], "did you mean relaxed?"),
    "verification of ranked trees": (["--verify", "multi-round", "--method", "opt-tree"], "static"),
    "unknown setting": (["--method", "chain", "--set", "width=3"], "depth"),
    "setting without a value": (["--set", "depth"], "KEY=VALUE"),
    "setting that is no number": (["--method", "chain", "--set", "depth=deep"], "deep"),
    "setting out of range": (["--method", "chain", "--set", "depth=0"], "depth is 0"),
    "unknown model": (["--target", "./nowhere"], "./nowhere"),
    "no such GGUF file": (["--target", "nowhere.gguf"], "nowhere.gguf"),
    "unknown drafter": (["--drafter", "./nobody"], "./nobody"),
    "empty prompt": (["--raw"], "empty"),
    "max_tokens 0": (["--max-tokens", "0"], "--max-tokens is 0"),
    "max_tokens beyond the context": (["--max-tokens", "5000"], "at most"),
    "negative temperature": (["--temperature", "-1"], "-1"),
    "temperature that is no number": (["--temperature", "nan"], "nan"),
    "temperature that is not numeric": (["--temperature", "warm"], "warm"),
    "top_p out of range": (["--top-p", "1.5"], "1.5"),
    "node budget 0": (["--nodes", "0"], "--nodes is 0"),
    "huge node budget": (["--nodes", "100000"], "100000"),
    "unknown dtype": (["--dtype", "int3"], "int3"),
    "unknown device": (["--device", "abacus"], "abacus"),
    "json and trees": (["--json", "--show-trees"], "--show-trees"),
    "unknown option": (["--tempreature", "1"], "--tempreature"),
    "unknown option, and where its command's are listed": (["--tempreature", "1"], "see 'draftree generate --help'"),
    "no thread": (["--threads", "0"], "--threads is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(case: str, model: str, capsys: Captured) -> None:
    arguments, named = BAD[case]
    prompt = "" if case == "empty prompt" else "the cat"
    target = [] if "--target" in arguments else ["--target", model]
    assert run(["generate", prompt, *target, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert printed.err.startswith("draftree: ")
    assert named in printed.err


def test_a_prompt_longer_than_the_context_is_one_line(model: str, capsys: Captured) -> None:
    assert run(["generate", "cat " * MAX_LENGTH, "--target", model]) == 2
    assert f"context length is {MAX_LENGTH} tokens" in capsys.readouterr().err


def test_a_drafter_of_other_bare_ids_is_refused_in_one_line(model: str, tmp_path: Path, capsys: Captured) -> None:
    words = byte_level()
    bare = Vocabulary("none", words.tokens, words.types)
    other = write(tmp_path / "bare.gguf", layers=1, vocabulary=bare)
    assert run(["generate", "the cat", "--target", model, "--drafter", str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has 274 tokens and target" in line and "bare.gguf has no tokenizer" in line
    assert "use a drafter with the target's tokens, or drafter 'lookup'" in line


@pytest.mark.parametrize(("content", "named"), [(b"not a model", "GGUF"), (b"GGUF" + bytes(range(200)), "version")])
def test_a_corrupt_gguf_file_is_one_line(
    content: bytes, named: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(content)
    assert run(["generate", "the cat", "--target", str(tmp_path / "broken.gguf")]) == 2
    complaint = capsys.readouterr().err
    assert "broken.gguf" in complaint
    assert named in complaint
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert run(["info", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_model_that_cannot_do_trees_decodes_without_drafts(tmp_path: Path, capsys: Captured) -> None:
    folder = str(save_tiny(tmp_path / "bloom", kind="bloom"))
    assert run(["info", folder]) == 0
    out = capsys.readouterr().out
    assert "transformers, without drafts" in out and "ALiBi" in out
    assert run(["generate", "the cat", "--target", folder, "--max-tokens", "4"]) == 0
    assert capsys.readouterr().err.count("decodes without drafts") == 1


def test_the_installed_command_fails_with_its_exit_code() -> None:
    """``test_the_module_is_the_command`` has what does not fail: a process of its own takes seconds to load torch."""
    command = shutil.which("draftree", path=str(Path(sys.executable).parent))
    assert command, "the entry point is not installed"
    bad = subprocess.run([command, "info", "./nowhere"], capture_output=True, text=True, check=False)  # noqa: S603
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "draftree: no such folder: './nowhere': give a model folder, a .gguf file or a hub id\n"


def test_compare_finds_the_same_tokens_when_sampling_without_a_seed(model: str, capsys: Captured) -> None:
    """The plain run drew its first token under a seed of its own."""
    asked = ("generate", "the cat", "--target", model, "--max-tokens", "12", "--temperature", "1", "--compare")
    for _ in range(4):
        plain = _json(capsys, *asked)["ar"]
        assert isinstance(plain, dict)
        assert plain["same_tokens"] is True


def test_piped_text_is_byte_for_byte(capsys: Captured) -> None:
    progress.write("a\tb\r\nx\x1b[0m")
    assert capsys.readouterr().out == "a\tb\r\nx\x1b[0m"


def test_a_truncated_weights_file_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    folder = save_tiny(tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    capsys.readouterr()
    assert run(["info", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"draftree: cannot load '{folder}'")


def test_a_prompt_that_is_not_text_is_one_line(model: str, capsys: Captured) -> None:
    assert run(["generate", "a\udcffb", "--target", model]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_no_success(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer turned Ctrl-C while a model was loaded into a return value, and the command ended as if all were well."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftree.cli.options.load", interrupted)
    assert run(["generate", "the cat"]) == 130
    assert capsys.readouterr().err == "draftree: interrupted\n"
