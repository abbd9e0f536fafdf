"""The values between schedulers, cores and runners: requests, steps, batches, events and effects. Pure."""
