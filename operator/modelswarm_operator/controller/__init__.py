"""Manager, workers and the executor, which is the only writer."""
