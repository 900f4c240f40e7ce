"""`modelswarm demo`: a chat, a kill, and the comparison with an undisturbed run."""
