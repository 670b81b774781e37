"""Command lines that cannot work, and odd ones that can: what people mistype, and what scripts pass on by accident.

Each runs through the real entry. A bad line ends with exit code 1 or 2, says so in at most three short lines, and
prints nothing where text is expected; nothing is a traceback, and nothing hangs.
"""

from __future__ import annotations

import io
import shlex
import signal
import sys
from collections.abc import Iterator

import pytest

from draftree.cli.main import run

from ..bench import runs
from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]

_SECONDS = 8
"""After which a line is said to hang; each takes milliseconds."""
_LONGEST = 3000
"""Characters of a complaint, at most."""
_WORDS = {
    "{nul}": "a\0b",
    "{bytes}": "a\udcff\udcfeb",
    "{long}": "x" * 5000,
    "{long_words}": "x " * 4000,
    "{huge}": str(10**30),
    "{digits}": "9" * 5000,
    "{empty}": "",
    "{blank}": " \t ",
}

GENERATE = """
cat --nodes 0
cat --nodes -1
cat --nodes 1.5
cat --nodes {huge}
cat --nodes {digits}
cat --nodes 4097
cat --nodes ten
cat --nodes {empty}
cat --nodes nan
cat --nodes
cat --max-tokens 0
cat --max-tokens -7
cat --max-tokens {huge}
cat --max-tokens {digits}
cat --max-tokens 1e3
cat --max-tokens inf
cat --max-tokens 129
cat --temperature -1
cat --temperature nan
cat --temperature inf
cat --temperature -inf
cat --temperature 1e-9
cat --temperature {long}
cat --temperature 0,1
cat --temperature {empty}
cat --top-k -1
cat --top-k 0.5
cat --top-k {huge}
cat --top-k -{huge}
cat --top-p 0
cat --top-p 1.01
cat --top-p nan
cat --top-p -inf
cat --top-p half
cat --min-p -0.1
cat --min-p 2
cat --min-p nan
cat --seed -1
cat --seed {huge}
cat --seed 9223372036854775808
cat --seed {long}
cat --seed 1.0
cat --stop {empty}
cat --stop
cat --method dynamic-widht
cat --method {empty}
cat --method {long}
cat --method {long_words}
cat --method {bytes}
cat --method {nul}
cat --method CHAIN
cat --method chain,static
cat --method chain:depth=2
cat --method +hsddw
cat --method hsddw+hsddw
cat --method chain+hsddw
cat --method sequoia
cat --method sequoia --tree {missing}
cat --method sequoia --tree {folder}
cat --method sequoia --tree {binary}
cat --method sequoia --tree {deep}
cat --method sequoia --tree {array}
cat --method sequoia --tree {text}
cat --method sequoia --tree {nul}
cat --method sequoia --tree {long}
cat --method sequoia --tree {empty}
cat --method sequoia --tree {text}/below
cat --method chain --tree {text}
cat --method chain --set width=3
cat --method chain --set depth
cat --method chain --set =
cat --method chain --set depth=
cat --method chain --set =3
cat --method chain --set depth=deep
cat --method chain --set depth=0
cat --method chain --set depth=-1
cat --method chain --set depth=1.5
cat --method chain --set depth={digits}
cat --method chain --set depth={long}
cat --method chain --set {long}=1
cat --method chain --set {empty}
cat --method static --set width=0
cat --method static --set width=nan
cat --method early-stop --set stop=nan
cat --method early-stop --set stop=-1
cat --method naive-width --set width=0
cat --method opt-tree --set delta=2
cat --method opt-tree --set delta=none
cat --method opt-tree --set delta=nan
cat --method opt-tree --set depth=0
cat --method eagle2 --set width=0
cat --method binary --set depth=3
cat --method eagle --set anything=3
cat --method auto --set width=0
cat --method auto --set classifier={missing}
cat --method c2t --set classifier={missing}
cat --method c2t --set classifier={folder}
cat --method c2t --set classifier={binary}
cat --method c2t --set classifier={deep}
cat --method c2t --set classifier={array}
cat --method c2t --set classifier={nul}
cat --method c2t --set classifier={long}
cat --method c2t --set classifier={empty}
cat --method c2t --set beta=2
cat --method c2t --set beta=nan
cat --method learned-width --set classifier={text}
cat --method hsddw --set crossing=jump
cat --method hsddw --set share=much
cat --method hsddw --set share=nan
cat --method hsddw --set floor=0
cat --method hsddw --set floor=9 --set cap=3
cat --method hsddw --set start=later
cat --method hsddw --set memory=0.5
cat --verify blocks
cat --verify {empty}
cat --verify {long}
cat --verify block --method static
cat --verify multi-round --method opt-tree
cat --verify multi-round --drafter lookup+recycle --method static
cat --drafter ./nobody
cat --drafter {empty}
cat --drafter {blank}
cat --drafter +
cat --drafter lookup+
cat --drafter +lookup
cat --drafter lookup++recycle
cat --drafter lookup+lookup
cat --drafter lookup+none
cat --drafter auto+lookup
cat --drafter >
cat --drafter >lookup
cat --drafter lookup>
cat --drafter lookup>>self
cat --drafter none>self
cat --drafter lookup>auto
cat --drafter lookup:tau=1>self
cat --drafter lookup>self:loop=often
cat --drafter lookup>self:tau=hot
cat --drafter lookup>self:tau=nan
cat --drafter lookup>self:pending=0
cat --drafter lookup>self:pending=-1
cat --drafter lookup>self:pending={digits}
cat --drafter lookup>self:method=chain
cat --drafter lookup:method=nonsense>self
cat --drafter lookup:method=chain:width=3>self
cat --drafter lookup:depth=3>self
cat --drafter {text}
cat --drafter {folder}
cat --drafter {nul}
cat --drafter ./{long}
cat --drafter lookup>{text}
cat --drafter self --no-loop-back
cat --drafter lookup>self:loop=threshold --no-loop-back
cat --recycle-file {out}/r --drafter lookup
cat --recycle-file {text} --drafter recycle
cat --recycle-file {folder} --drafter recycle
cat --recycle-file {missing}/r --drafter recycle
cat --recycle-file {nul} --drafter recycle
cat --recycle-file {out}/{long} --drafter recycle
cat --trace {text}
cat --trace {folder}
cat --trace {missing}/t
cat --trace {text}/t
cat --trace {nul}
cat --trace {out}/{long}
cat --trace {empty}
cat --force
cat --dtype int3
cat --dtype {empty}
cat --dtype {long}
cat --device abacus
cat --device cuda:99
cat --device cuda:x
cat --device meta
cat --device {long}
cat --weight-format int4
cat --weight-format {empty}
cat --weight-format int8 --dtype bfloat16
cat --json --show-trees
cat --explain --drafter none
cat --explain --method chain
cat --tempreature 1
cat --{long}
cat dog
cat dog --raw
{empty}
{blank}
{bytes}
-
--raw
cat --beams 0
cat --beams -1
cat --beams {huge}
cat --beams two
cat --beams 4 --trace {out}/t
cat --beams 4 --nodes 7
cat --beams 4 --show-trees
cat --beams 4 -n 5
cat --beams 4 --draft-beams 2
cat --beams 4 --early-stopping maybe
cat --beams 4 --length-penalty nan
cat --beams 4 --length-penalty {huge}
cat --beams 4 --width-threshold 2 --temperature 1
cat --beams 4 --width-threshold 0.9
cat --beams 4 --single-cache
cat --beams 4 --drafter recycle
cat --beams 2 --stop x
cat -n 2
cat --single-cache
"""

OTHERS = """
{empty}
nonsense
{long}
{bytes}
--nonsense
-x
generate
generate --target {model}
chat extra
chat --target ./nowhere
chat --target {model} --nodes 0
chat --target {model} --method nonsense
chat --target {model} --temperature nan
chat --target {model} --max-tokens 0
chat --target {model} --force
chat --target {model} --trace {folder}
chat --target {model} --trace {text}
chat --target {model} --stop x
chat --target {model} --drafter lookup>self --no-loop-back --no-loop-forward
chat --target {model} --drafter head
chat --target {model} --recycle-file {text} --drafter recycle
info
info ./nowhere
info {empty}
info {blank}
info {text}
info {folder}
info {nul}
info ./{long}
info {missing}
info {text}.gguf
info {model} extra
info {model} --dtype float8
info {model} --device cuda:x
info {model} --weight-format {long}
info smolm2
methods extra
methods --all
profile
profile ./nowhere
profile {model} --sizes 2,4
profile {model} --sizes 1
profile {model} --sizes 1,1
profile {model} --sizes 4,1
profile {model} --sizes 1,x
profile {model} --sizes 1,,2
profile {model} --sizes 1,{digits}
profile {model} --sizes 1,{huge}
profile {model} --sizes -1,2
profile {model} --sizes 1,nan
profile {model} --contexts 0
profile {model} --contexts x
profile {model} --batches 0
profile {model} --batches 1,{huge}
profile {model} --batches 1.5
profile {model} --repeats 0
profile {model} --repeats -1
profile {model} --repeats {huge}
profile {model} --repeats 1000000
profile {model} --repeats x
profile {model} --plot {out}/p.gif
profile {model} --plot {missing}/p.png
profile {model} --plot {nul}.png
profile {model} --plot {folder}
bench
bench --suite {suite}
bench --out {out}/b
report
report {missing}
report {text}
report {folder}
report {nul}
report {empty_folder}
report {run} {missing}
report {run} {empty_folder}
report {run} --markdown {out}/r.md
report {run} extra
calibrate
calibrate --prompts {text}
calibrate --out {out}/c
train
train nonsense
train head
train classifier
train head --prompts {text}
train --hours 1
"""

BENCH = """
--suite nonsense
--suite {empty}
--suite {missing}
--suite {folder}
--suite {nul}
--suite {long}
--suite {text}
--suite {binary}
--suite {array}
--suite {deep}
--suite {zero}
--suite {strange}
--suite {zero}.gz
--suite spec-bench --data {missing}
--suite humaneval --data {text}
--suite spider --data {empty_folder}
--limit 0
--limit -3
--limit x
--limit {digits}
--turns 0
--turns -1
--turns 1.5
--repeats 0
--repeats -1
--repeats {huge}
--repeats 100000000
--repeats x
--seed -1
--seed {huge}
--seed 9223372036854775807 --repeats 2
--max-tokens 0
--max-tokens {digits}
--nodes 0
--nodes {huge}
--temperature warm
--temperature {empty}
--temperature ,
--temperature nan
--temperature 0,0
--temperature -1,0
--temperature inf
--categories nonsense
--categories {long}
--methods nonsense
--methods {long}
--methods chain,chain
--methods chain:depth
--methods chain:depth=x
--methods chain:depth=0
--methods chain:nodes=0
--methods chain:nodes=x
--methods chain:nodes={huge}
--methods chain:nodes={digits}
--methods chain:nodes=²
--methods chain:verify=x
--methods chain:width=2
--methods :
--methods peer:
--methods peer:nobody
--methods peer:hf-generate:x=1
--methods peer:hf-assisted
--methods peer:hf-beam-search:draft=9
--methods beams:width=0
--methods beams:width=x
--methods beams:width=1.5
--methods beams:early=perhaps
--methods beams:penalty=nan
--methods beams:colour=red
--methods beams:drafter=recycle
--methods sequoia:tree={missing}
--methods sequoia:tree={binary}
--drafters {empty}
--drafters none
--drafters ,
--drafters lookup,lookup
--drafters lookup+lookup
--drafters lookup>
--drafters self --no-loop-back
--drafters ./nobody
--target ./nowhere
--dtype x
--out {text}
--out {text}/b
--out {folder}
--out {nul}
--out {empty}
--out {out}/{long}
"""

CALIBRATE = """
--prompts {missing}
--prompts {folder}
--prompts {binary}
--prompts {zero}
--prompts {nul}
--prompts {long}
--prompts {empty}
--prompts {strange}
--prompts {deep}
--prompts {table}
--nodes 0
--nodes {huge}
--depth 0
--depth 65
--depth {huge}
--depth x
--stride 0
--stride -1
--max-tokens 1
--max-tokens {digits}
--temperature nan
--seed -1
--drafter none
--drafter recycle
--drafter lookup+self
--drafter ./nobody
--out {text}
--out {folder}
--out {missing}/c
--out {text}/c
--out {nul}
--out {out}/{long}
--out {empty}
--target ./nowhere
"""

HEAD = """
--hours 0
--hours -1
--hours nan
--hours inf
--hours x
--tokens 0
--max-tokens 1
--steps 0
--steps x
--batch 0
--batch -1
--learning-rate 0
--learning-rate nan
--learning-rate 2
--unroll 0
--unroll {huge}
--vocabulary 0
--held-out -1
--responses 0
--responses {huge}
--rows 0
--rows {huge}
--seed -1
--seed {huge}
--init {folder}
--init {missing}
--init {nul}
--licence a --licence b
--prompts {missing}
--prompts {nul} --force
--out {text}
--out {missing}/h
--out {model}
--out {nul}
--out {out}/{long}
--target ./nowhere
--device abacus
"""

CLASSIFIER = """
--samples 0
--samples {huge}
--samples x
--negatives 0
--negatives nan
--negatives 2
--max-tokens 1
--rows 0
--rows {huge}
--features {empty}
--features colour
--features entropy,entropy
--features {long}
--hidden 0
--hidden {huge}
--epochs 0
--epochs {huge}
--batch 0
--learning-rate 0
--learning-rate nan
--fine-tune {missing}
--fine-tune {text}
--fine-tune {nul}
--apart 1
--apart {huge}
--seed -1
--data {text}
--data {nul}
--drafter none
--drafter ./nobody
--out {folder}
--out {text}
--out {missing}/c
--prompts {zero}
--prompts {table}
--licence a --licence b
"""

_BASES = {
    "generate": (GENERATE, "generate {line} --target {model}"),
    "other": (OTHERS, "{line}"),
    "bench": (BENCH, "bench --suite {suite} --out {out}/b --methods chain --drafters self --target {model} {line}"),
    "calibrate": (CALIBRATE, "calibrate --prompts {text} --out {out}/c --drafter self --target {model} {line}"),
    "head": (HEAD, "train head --prompts {text} --out {out}/h --target {model} {line}"),
    "classifier": (
        CLASSIFIER,
        "train classifier --prompts {text} --out {out}/c --drafter self --target {model} {line}",
    ),
}
BAD = [(kind, line) for kind, (lines, _) in _BASES.items() for line in lines.strip().splitlines()]

ODD = """
--help
generate --help
train head --help
methods
generate cat --max-tokens 2 --target {model} --temperature 1e9 --seed 0
generate cat --max-tokens 2 --target {model} --stop {bytes}
generate {nul} --max-tokens 2 --target {model}
generate cat --max-tokens 2 --target {model} --temperature 0.0001 --seed 9223372036854775807
generate cat --max-tokens 2 --target {model} --nodes 1024 --method binary --drafter self
generate cat --max-tokens 2 --target {model} --drafter recycle+lookup
generate cat --max-tokens 2 --target {model} --drafter lookup>self:loop=never
generate cat --max-tokens 2 --target {model} --method hsddw --drafter self
generate cat --max-tokens 2 --target {model} --set width=2 --set width=3
generate cat --max-tokens 2 --target {model} --trace /dev/null
generate cat --max-tokens 2 --target {model} --json --compare --explain
generate cat --max-tokens 2 --target {model} --stop {long}
generate --max-tokens 2 --target {model} -- --raw
generate 猫 --max-tokens 2 --target {model}
report {run}
bench --suite {suite} --out {out}/new --methods ar, --limit 1000000 --target {model} --max-tokens 2 --temperature 0,
""".strip().splitlines()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces in a line: words that no shell would pass on well, files and folders."""
    place = tmp_path_factory.mktemp("places")
    for folder in ("folder/inner", "out", "empty_folder"):
        (place / folder).mkdir(parents=True)
    save_tiny(place / "model")
    runs.full_run(place / "run")
    files = {
        "text": b"the cat\nthe hat\nin the cat\n",
        "binary": b"\xff\xfe\x00 no text",
        "zero": b"",
        "zero.gz": b"",
        "array": b"[1, 2]\n",
        "deep.jsonl": b"[" * 100_000 + b"\n",
        "strange.jsonl": b'{"colour": "red"}\n',
        "table.csv": b"colour\nred\n",
        "text.gguf": b"text",
        "suite.jsonl": b'{"prompt": "the cat"}\n',
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    found = {f"{{{p.stem}}}": str(p) for p in sorted(place.iterdir()) if p.suffix not in (".gz", ".gguf")}
    return {**_WORDS, **found, "{missing}": str(place / "missing")}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fails what takes longer than ``_SECONDS``."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"still running after {_SECONDS} s"))
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _arguments(line: str, places: dict[str, str]) -> list[str]:
    words = shlex.split(line.replace(">", "\\>"))
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    return words


@pytest.mark.parametrize(("kind", "line"), BAD)
def test_a_bad_command_line_is_a_short_complaint(
    kind: str, line: str, places: dict[str, str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    arguments = _arguments(_BASES[kind][1].replace("{line}", line), places)
    capsys.readouterr()
    assert run(arguments) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert 1 <= len(printed.err.strip().splitlines()) <= 3
    assert len(printed.err) <= _LONGEST


@pytest.mark.parametrize("line", ODD)
def test_an_odd_command_line_works(line: str, places: dict[str, str], capsys: Captured) -> None:
    assert run(_arguments(line, places)) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_there_are_at_least_300_bad_lines() -> None:
    assert len(set(BAD)) == len(BAD) >= 300
