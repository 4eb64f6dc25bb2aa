"""The model of times: what decode and prefill take, as terms with priors and a fit."""
