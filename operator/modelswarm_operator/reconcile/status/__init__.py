"""The status of a ModelSwarm: conditions, problems, pod diagnosis."""
