"""``python -m examples.wallet`` runs the demo."""

from examples.wallet.demo import main

if __name__ == "__main__":
    raise SystemExit(main())
