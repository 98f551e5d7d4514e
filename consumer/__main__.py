"""``python -m consumer`` is the command ``consumer``."""

from consumer.cli import main

main()
