"""The values that `reconcile` reads and returns."""
