"""`modelswarm ui`: one page for a browser on this machine, with servers, live sessions and a chat."""
