"""``python -m examples.failures`` runs the gallery."""

from examples.failures.gallery import main

if __name__ == "__main__":
    raise SystemExit(main())
