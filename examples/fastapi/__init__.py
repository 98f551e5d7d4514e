"""`consumer.first_time` in a web service: an Idempotency-Key header, a webhook that is repeated, a job of two schedulers."""
