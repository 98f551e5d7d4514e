"""What a handler does outside the database: a mail, a payment with an idempotency key, one without.

A call cannot be part of a transaction. So a handler records a job for it in its transaction, with an id derived from
the event that it handles, and a consumer of its own makes the call. `docs/how-to/effects.md` says how to run them, and
what remains possible with each kind of API; `tests/examples/test_effects.py` kills the consumers in the worst moment
and counts.
"""
