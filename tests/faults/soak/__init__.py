"""Everything that can go wrong, at random, under load, for as long as you like: ``make soak SECONDS=600``.

Writers credit accounts and record events while relays and consumers run as processes of their own behind proxies. Faults
come at random. Afterwards nobody helps: the processes must come to rest by themselves, and then every invariant is checked
against the outbox, which is the truth. Ctrl-C ends the faults early; what there is then is checked.
"""
