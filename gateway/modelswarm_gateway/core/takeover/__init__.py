"""Session takeover: another gateway continues a session whose gateway is gone."""
