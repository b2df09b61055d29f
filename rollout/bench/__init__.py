"""Measuring rollouts: arms that do the same work, run close together, compared pair by pair.

Not here: what a user configures (``rollout.job_config.BenchConfig``) and the command itself
(``rollout.jobs.bench``). Every arm of our own must produce the same text in every run, or there is no result.
"""
