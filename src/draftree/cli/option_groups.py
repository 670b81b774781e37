"""The options of a command's help in groups, those that people need first on top."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

GROUPS = {
    "Most used": (
        "--target --drafter --method --nodes --max-tokens --temperature --seed --stop --show-trees --compare".split()
    ),
    "Input": "--raw --prediction --chat-template --chat-template-kwargs".split(),
    "Model": "--backend --threads --dtype --device --runner".split(),
    "Drafting": "--set --verify --candidates".split(),
    "Sampling": (
        "--top-k --top-p --min-p --min-tokens --ignore-eos --bad-word --repetition-penalty --frequency-penalty "
        "--presence-penalty --json-schema --regex"
    ).split(),
    "Output": "--json --explain --trace".split(),
    "Advanced": (
        "--beams -n --draft-beams --depth --width-threshold --min-beams --length-penalty --early-stopping "
        "--single-cache --help"
    ).split(),
}
"""Title -> options, in the order of the help; the help of a command lists its remaining options first."""
_GROUP = {option: title for title, options in GROUPS.items() for option in options}
_OWN = "Options"


class GroupedCommand(TyperCommand):
    """A command whose help has its own options first and then ``GROUPS``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        titles: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", _OWN, *GROUPS)}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                argument = parameter.param_type_name == "argument"
                titles["Arguments" if argument else _GROUP.get(parameter.opts[0], _OWN)].append(record)
        for title, records in titles.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
