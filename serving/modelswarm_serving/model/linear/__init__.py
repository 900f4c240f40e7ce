"""Weight matrices of a span, their layouts, and the choice of a layout by measurement."""
