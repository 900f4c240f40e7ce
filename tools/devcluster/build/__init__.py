"""Building the cluster's programs, packages and images."""
