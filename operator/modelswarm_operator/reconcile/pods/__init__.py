"""Pod inventory, slots, the slot filler and the rollout."""
