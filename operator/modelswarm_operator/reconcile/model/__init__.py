"""Facts about the model and the span plan."""
