"""The planner beside a running platform: what it reads (`sources`), plans by (`watcher`), and may do (`hands`)."""
