"""Training through frozen blocks on servers: passes, their gradients, and soft prompts."""
