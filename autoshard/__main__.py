"""``python -m autoshard`` is ``autoshard``."""

from autoshard.cli import main

main(prog_name="autoshard")
