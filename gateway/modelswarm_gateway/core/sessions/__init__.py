"""State of one session: input log, hops, replay plan."""
