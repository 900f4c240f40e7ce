"""The shell around the core: event loop, links, timers."""
