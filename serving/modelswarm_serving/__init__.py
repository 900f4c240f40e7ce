"""The block server: holds a span of blocks and the KV of live sessions, and runs rows through it."""
