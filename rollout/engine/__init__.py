"""One replica of the policy: what an engine is, and the target distribution every engine samples from."""
