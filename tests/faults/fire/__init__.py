"""Jobs under fire: producers, workers and relays are killed -9 at random under load: ``make fire SECONDS=60``.

Two producers record jobs and two enqueue them, with delays, priorities, last-in jobs, and ids that come again; four workers do them.
Whatever a scheduler does elsewhere every worker does here: it makes ready what is due in its own queue, and what the dead have
claimed in every queue. So there are four workers of another queue besides, which have nothing else to do, and two relays. All of
them are killed and started again for as long as it lasts. Then every accepted job must be done, its effect once, none before its
time, and nothing left in Redis but what is documented, without a TTL.
"""
