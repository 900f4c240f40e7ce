"""`modelswarm chat`: one session with many turns, from the terminal. The options are in `commands/chat.py`."""
