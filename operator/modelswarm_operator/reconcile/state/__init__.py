"""Values that reconcile reads and returns."""
