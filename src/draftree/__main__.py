"""The command line: Ctrl-C is taken care of before anything is loaded that takes time."""

import gc

from .cli.interrupt import exit_on_interrupt

_NEW_OBJECTS = 50_000
"""After so many garbage is looked for: while modules are loaded there is none, and looking took a tenth of a second."""


def main() -> None:
    """Entry point of the ``draftree`` command."""
    exit_on_interrupt()
    gc.set_threshold(_NEW_OBJECTS)
    from .cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
