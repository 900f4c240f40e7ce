"""Forward and backward passes through frozen blocks, for training at the client."""
