"""The block server: holds a span of blocks and the KV of sessions, and runs rows through the blocks."""
