"""``python -m graphquant``: the same as the command ``graphquant``."""

from graphquant.cli import main

main()
