"""Pod network, DNS, network namespaces, ports."""
