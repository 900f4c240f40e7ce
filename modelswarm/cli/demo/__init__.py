"""`modelswarm demo`: a chat, a kill, and the comparison with a run without a kill."""
