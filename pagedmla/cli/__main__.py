"""``python -m pagedmla.cli``."""

from pagedmla.cli.entry import run

if __name__ == "__main__":
    run()
