"""Plain values that enter and leave the core: settings, turns, effects, views, errors."""
