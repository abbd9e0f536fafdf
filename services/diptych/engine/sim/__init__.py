"""A simulated model: schedulers, KV pages and transfers are real, a clock takes the place of mathematics. No torch."""
