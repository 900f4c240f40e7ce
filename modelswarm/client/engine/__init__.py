"""The engine of small inference programs on a swarm: texts, and contexts that are stepped by hand."""
