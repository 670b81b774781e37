"""The command line: Ctrl-C is taken care of before anything is loaded that takes time."""

from .cli.interrupt import exit_on_interrupt


def main() -> None:
    """Entry point of the ``draftree`` command."""
    exit_on_interrupt()
    from .cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
