"""See how a running platform is: members, links, caches, single steps, and whether it answers at all."""
