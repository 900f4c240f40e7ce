"""etcd, API server, controllers, kwok and their keys."""
