"""Bring a platform up: a machine that is fit, files of a model, secrets, values for the chart, and `diptych up`."""
