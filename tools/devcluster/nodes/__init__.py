"""Nodes: kubelet, containerd, kube-proxy, cgroups, volumes."""
