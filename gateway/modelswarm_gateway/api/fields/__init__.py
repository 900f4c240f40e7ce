"""Every field that a request of any API may have, and its state: obeyed, refused, without effect."""
