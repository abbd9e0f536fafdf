"""Pages that outlive a process, of which each rank has its part: in files of its own, and in objects of a store."""
