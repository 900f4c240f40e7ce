"""Route choice: server registry, costs, path search, zones."""
