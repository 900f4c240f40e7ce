"""What enters and leaves the core: settings, turns, effects, views."""
