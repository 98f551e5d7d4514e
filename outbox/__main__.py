"""``python -m outbox`` is the command ``outbox``."""

from outbox.cli import main

main()
