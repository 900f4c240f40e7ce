"""The gateway: opens sessions over routes of block servers and keeps their streams alive."""
