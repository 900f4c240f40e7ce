"""The recovery loop: fence all hops, plan a route, start the new epoch."""
