"""The wallet demo: payments that are repeated, killed half-way, rolled back and delivered late.

Read in this order:

* `models`     the tables of a payment service and of a wallet
* `service`    the producer: business row and event in one transaction
* `handlers`   the consumer: each event takes effect exactly once
* `naive`      three consumers without a ledger: what NOT to do, and why
* `processes`  the processes of the demo, and where each one is made to die
* `demo`       the story, step by step, with what is expected beside what happened

Run it with ``make demo`` or ``python -m examples.wallet``.
"""
