"""One generation request, from the API to its last text."""
