"""The wire between gateway and block servers: identities, messages, frames and links."""
