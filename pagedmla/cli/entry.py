"""What the installed ``pagedmla`` script calls: where typer and rich are not installed, it says so."""

from __future__ import annotations

import sys

_CLI_PACKAGES = ("typer", "rich", "click")


def run() -> None:
    """Runs the command line; a missing package of it is one line on stderr and exit status 2."""
    try:
        from pagedmla.cli.main import app
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _CLI_PACKAGES:
            raise
        sys.stderr.write(f"pagedmla: the command line needs {package}: pip install 'pagedmla[cli]'\n")
        sys.exit(2)
    app()
