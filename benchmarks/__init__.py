"""Side-by-side measurements: ours beside what one would write by hand, in one run, on servers of its own."""
