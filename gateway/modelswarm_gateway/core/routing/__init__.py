"""Route choice: server registry, cost model, path search, zone delays."""
