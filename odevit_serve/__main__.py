"""The command `odevit-serve`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends as it does later."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
