"""The failure gallery: the classic ways to lose or repeat work with PostgreSQL and Redis, each done twice.

``naive_…`` is the way it is often written, ``our_…`` the same misfortune with the outbox, the relay and the ledger. Servers
and processes are real, and so are the kills. Read in this order:

* `place`     payments, what workers do with them, and how it is counted what became of them
* `stage`     servers, databases, and processes that may be killed
* `crashes`   the worker is killed: BRPOP, ack before commit, dedup mark in Redis
* `slow`      the worker only seems dead: visibility time-out
* `losses`    Redis loses data: eviction, SIGKILL, power cut
* `failover`  a replica that was behind takes over
* `trims`     somebody trims the stream: MAXLEN, acknowledged entries, and what the server's ``lag`` says afterwards
* `polling`   an outbox that is read by its last id
* `gallery`   runs them all and prints the table

Run it with ``make failures`` or ``python -m examples.failures``.
"""
