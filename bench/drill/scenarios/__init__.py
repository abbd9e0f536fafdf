"""What befalls the platform: one idea a module, each with its `SCENARIO`."""
